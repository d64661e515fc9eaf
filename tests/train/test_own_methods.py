"""A method of one's own: functions by the places of their files, and what is wrong with them."""

import numpy as np
import pytest

from exgrpo.train import early
from exgrpo.train.errors import ConfigError
from tests.train.configs import configured
from tests.train.test_methods import rows_of
from tests.train.trainers import half, make

OWN = """
from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.sampling import Priority
from exgrpo.train.experience.supply import PlannedGroup
from exgrpo.train.experience.units import Expired
from exgrpo.train.experience.weighing import Weighed

def admit(group, setting):
    return [row for row in group.fresh if row.reward < setting.success]

def prioritise(units, setting):
    return Priority(-1e3 * units.question.astype(float))

def settle(groups, supply):
    return [*groups, *supply.alone(supply.draw("stored", 2))]

@needs(settle=settle)
def compose(supply):
    return supply.fresh(3)

@needs(term="ratio")
def weigh(answers, options):
    return [Weighed(answer.log_prob, advantage=7.0) for answer in answers]

def expire(units, setting):
    return Expired(units.length > 5, units.solved)

number = 5
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def places(path, **others: str) -> dict:
    """Recipe values that name all five functions of a file."""
    names = {kind: f"{path}:{kind}" for kind in ("admit", "prioritise", "compose", "weigh", "expire")} | others
    weigh, expire = names.pop("weigh"), names.pop("expire")
    return {"experience": {**names, "expire": [expire], "advantage": "stored"}, "objective": {"weigh": weigh}}


def test_a_method_may_be_a_file_of_ones_own(own):
    values = places(own)
    early.check_method(configured(values))
    trainer = make({**half(12), 3: 1.0}, **values)
    seen = [trainer.step(step) for step in range(1, 8)]
    memory = trainer.replay.memory
    assert all(len(one.questions) - len([rows for rows in one.replayed if rows]) == 3 for one in seen)
    assert {row.reward for row in memory.all_trajectories()} == {0.0}
    assert max(len(row.response) for row in memory.all_trajectories()) <= 5
    assert np.flatnonzero(memory.retired).tolist() == [3]
    lowest = sorted(row.question for row in memory.all_trajectories())[0]
    assert {row.question for rows in seen[-1].replayed for row in rows} >= {lowest}
    replayed = [row for row in rows_of(trainer) if row.replayed]
    assert {row.advantage for row in replayed} == {7.0}
    assert set(trainer.policy.terms) == {"ratio"}


@pytest.mark.parametrize("kind", ["admit", "prioritise", "compose", "weigh", "expire"])
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("{folder}/nowhere.py:admit", "there is no file {folder}/nowhere.py"),
        ("{file}:{near}", "there is no '{near}' in it; did you mean '{kind}'?"),
        ("{file}:number", "is not callable: it is a int"),
        ("no.such.package:admit", "cannot import no.such.package: ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_loaded_is_one_clear_error(own, kind, place, message):
    known = {"file": own, "folder": own.parent, "kind": kind, "near": f"{kind}s"}
    with pytest.raises(ConfigError) as error:
        early.check_method(configured(places(own, **{kind: place.format(**known)})))
    said = str(error.value)
    assert said.startswith(f"{kind} function '{place.format(**known)}'")
    assert message.format(**known) in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("key", "name", "near"),
    [
        ("experience.admit", "success", "successes"),
        ("experience.prioritise", "gausian", "gaussian"),
        ("experience.compose", "mixd", "mixed"),
        ("experience.expire", ["retirment"], "retirement"),
        ("objective.weigh", "decoupld", "decoupled"),
    ],
)
def test_an_unknown_name_is_told_with_the_near_one(key, name, near):
    with pytest.raises(ConfigError, match=rf"{key}.*unknown .* function .*; did you mean '{near}'\? there are "):
        configured({key: name})


def test_weights_that_do_not_fit_are_one_clear_error(own):
    for body, message in (
        ("Priority(units.question[1:].astype(float))", r"gave \d+ numbers for \d+ units"),
        ("Priority(units.question * float('nan'))", "a logarithm of a weight is nan"),
        ("Priority(units.count - float('inf'))", "all logarithms of weights are -inf"),
    ):
        own.write_text(OWN.replace("Priority(-1e3 * units.question.astype(float))", body))
        trainer = make(half(12), **places(own, compose="mixed", admit="all"))
        trainer.step(1)
        with pytest.raises(ConfigError, match=rf"experience.prioritise {own}:prioritise: {message}|{message}"):
            trainer.step(2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("Weighed(a.log_prob, np.full_like(a.log_prob, np.nan))", "a factor of the advantage is nan"),
        ("Weighed(a.log_prob, np.full(len(a.log_prob), 1e39))", "a factor of the advantage is inf"),
        ("Weighed(a.log_prob, -np.ones_like(a.log_prob))", "a factor of an answer's own advantage is negative: -1.0"),
        ("Weighed(a.log_prob * np.nan)", "a log-prob of the reference is nan"),
        ("Weighed(a.log_prob - np.inf)", "a log-prob of the reference is -inf"),
        ("Weighed(a.log_prob, advantage=float('inf'))", "an advantage is inf"),
        ("Weighed(a.log_prob, np.ones(1))", r"a factor has the shape \(1,\) for an answer of \d+ tokens"),
        ("a.log_prob", r"it gave array\(.* \(ndarray\) for an answer; it gives a Weighed for each"),
    ],
)
def test_terms_that_would_spoil_the_update_are_one_clear_error(own, given, message):
    weigh = f"import numpy as np\n\ndef weigh(answers, options):\n    return [{given} for a in answers]\n"
    own.write_text(OWN.replace("def weigh(", "def former(") + weigh)
    trainer = make(half(12), objective={"weigh": f"{own}:weigh"})
    trainer.step(1)
    with pytest.raises(ConfigError, match=f"^objective.weigh {own}:weigh: {message}$"):
        trainer.step(2)


def test_a_weigh_function_without_a_list_is_one_clear_error(own):
    own.write_text(OWN.replace("return [Weighed(answer.log_prob, advantage=7.0) for answer in answers]", "pass"))
    trainer = make(half(12), objective={"weigh": f"{own}:weigh"})
    with pytest.raises(
        ConfigError, match=r"it gave None \(NoneType\); it gives a list with one Weighed for each answer"
    ):
        trainer.step(1)


def test_a_term_of_ones_own_advantage_may_have_any_sign(own):
    own.write_text(OWN.replace("log_prob, advantage=7.0", "log_prob, -answer.log_prob**0, advantage=7.0"))
    trainer = make(half(12), objective={"weigh": f"{own}:weigh"})
    for step in (1, 2):
        trainer.step(step)
    assert {weight for row in rows_of(trainer) if row.replayed for weight in row.weight.tolist()} == {-1.0}


@pytest.mark.parametrize(
    ("need", "message"),
    [
        ('term="clipt"', "unknown term 'clipt' in @needs; did you mean 'clipped'? there are shaped, ratio, clipped"),
        ('term="xyz"', "unknown term 'xyz' in @needs; there are shaped, ratio, clipped"),
        ("term=None", "unknown term None in @needs; there are shaped, ratio, clipped"),
        ('present="value"', "unknown present 'value' in @needs; did you mean 'values'? there are values, reference"),
    ],
)
def test_a_function_that_needs_what_there_is_not_is_refused_before_the_run(own, need, message):
    own.write_text(OWN.replace('term="ratio"', need))
    values = {"objective": {"weigh": f"{own}:weigh"}}
    for refuse in (lambda: early.check_method(configured(values)), lambda: make(half(12), **values)):
        with pytest.raises(ConfigError) as error:
            refuse()
        assert str(error.value) == f"objective.weigh {own}:weigh: {message}"
