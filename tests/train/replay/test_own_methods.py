"""A method of one's own: functions by the places of their files, and what is wrong with them."""

import re

import numpy as np
import pytest

from exgrpo.train.common.errors import ConfigError
from exgrpo.train.run import startup_checks
from tests.train.configs import configured
from tests.train.trainers import half, make, updated

OWN = """
from exgrpo.train.replay import Expired, PlannedGroup, Priority, Weighed, needs

def admit(batch, options):
    return batch.fresh & (batch.reward < options.success)

def prioritise(candidates, options):
    return Priority(-1000 * candidates.question)

def settle(batch, planner):
    return [*range(batch.groups), *planner.alone(planner.draw("stored", 2))]

@needs(settle=settle)
def compose(planner):
    return planner.fresh(3)

@needs(term="ratio")
def weigh(batch, options):
    return Weighed(batch.old_log_prob, advantage=7.0 + 0 * batch.reward)

def expire(candidates, options):
    return Expired(candidates.length > 5, candidates.solved)

number = 5
"""
PAST = "batch.old_log_prob"


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
    startup_checks.check_method(configured(values))
    trainer = make({**half(12), 3: 1.0}, **values)
    seen = [trainer.step(step) for step in range(1, 8)]
    memory = trainer.replay.memory
    assert all(len(np.unique(one.batch.group[one.batch.fresh])) == 3 for one in seen)
    assert all(3 < one.batch.groups <= 5 for one in seen)
    stored = memory.table.stored()
    assert set(stored.reward.tolist()) == {0.0}
    assert stored.length.max() <= 5
    assert np.flatnonzero(memory.retired).tolist() == [3]
    assert stored.question.min() in seen[-1].batch.question[3:]
    replayed = [row for row in updated(trainer) if row.replayed]
    assert {row.advantage for row in replayed} == {7.0}
    assert set(trainer.policy.terms) == {"ratio"}


def test_stored_answers_that_are_planned_ahead_are_the_same_after_a_restart(tmp_path):
    """A restored memory numbers its rows anew."""
    path = tmp_path / "ahead.py"
    path.write_text(
        "def compose(planner):\n    return [*planner.fresh(4), *planner.alone(planner.draw('stored', 2))]\n"
    )
    experience = {"compose": f"{path}:compose", "advantage": "stored", "capacity": 12}
    rollout = {"behaviour": "engine", "ahead": True, "servers": ["http://unused:8000"]}
    trainer, other = (make(half(24), experience=experience, rollout=rollout) for _ in range(2))
    for step in range(1, 6):
        trainer.step(step)
    other.restore(trainer.state())
    expected, found = (one.step(6).batch for one in (trainer, other))
    assert expected.replayed.sum() == 2
    assert found.token.tolist() == expected.token.tolist()


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
        startup_checks.check_method(configured(places(own, **{kind: place.format(**known)})))
    said = str(error.value)
    assert said.startswith(f"{kind} function '{place.format(**known)}'")
    assert message.format(**known) in said
    assert "\n" not in said


READS = "chosen = batch.by_token(batch.fresh)\n    assert not np.isnan(batch.COLUMN[chosen]).any()\n    "


@pytest.mark.parametrize("column", ["old_log_prob", "log_prob", "entropy"])
@pytest.mark.parametrize("kind", ["admit", "settle"])
def test_scores_of_fresh_answers_are_there_for_a_function_that_needs_them(own, kind, column):
    """They are those of all answers; without the declaration the column cannot be read."""
    reads = OWN.replace("\nfrom", "\nimport numpy as np\nfrom", 1)
    head = f"def {kind}(" + {"admit": "batch, options):\n    ", "settle": "batch, planner):\n    "}[kind]
    reads = reads.replace(head, head + READS.replace("COLUMN", column))
    own.write_text(reads)
    config = configured(places(own))
    with pytest.raises(ConfigError, match=rf"{kind}: .*{column} .*needs @needs\(scores=True\)"):
        startup_checks.check_method(config)
    own.write_text(reads.replace(head, "@needs(scores=True)\n" + head))
    startup_checks.check_method(config)
    values = places(own)
    values["objective"] |= {"entropy_coef": 0.0}
    trainer = make({**half(12), 3: 0.0}, **values)
    for step in (1, 2, 3):
        batch = trainer.step(step).batch
        assert not np.isnan(batch.entropy[batch.by_token(batch.fresh)]).any()


def test_a_term_of_ones_own_advantage_may_have_any_sign(own):
    own.write_text(OWN.replace("old_log_prob, ", "old_log_prob, -(batch.old_log_prob**0), "))
    trainer = make(half(12), objective={"weigh": f"{own}:weigh"})
    for step in (1, 2):
        trainer.step(step)
    assert {factor for row in updated(trainer) if row.replayed for factor in row.factor.tolist()} == {-1.0}


@pytest.mark.parametrize(
    ("kind", "need", "message"),
    [
        ("weigh", 'term="clipt"', "@needs: term is one of 'shaped', 'ratio', 'clipped', and not 'clipt' (own.py, line"),
        ("weigh", 'present="value"', "@needs: present is one of None, 'values', 'reference', and not 'value'"),
        ("weigh", 'distinct="key"', "weigh: @needs(distinct=...) has no meaning for this kind of function: there are"),
        ("admit", 'distinct="respnse"', "@needs: distinct is one of None, 'response', 'key', and not 'respnse'"),
        ("admit", "scroes=True", "@needs: unknown name 'scroes'; did you mean 'scores'? (own.py, line"),
        ("admit", 'scores="yes"', "@needs: scores is one of False, True, and not 'yes' (own.py, line"),
        ("admit", "xyz=True", "@needs: unknown name 'xyz'; there are distinct, scores, drift, settle, "),
        ("compose", 'settle="settle"', "@needs: settle is a function, and not 'settle' (own.py, line"),
        ("settle", "alone=True", "settle: @needs(alone=...) has no meaning for this kind of function: there are"),
        ("prioritise", "scores=True", "@needs(scores=...) has no meaning for this kind of function: there are drift"),
    ],
)
def test_a_function_that_needs_what_there_is_not_is_refused_before_the_run(own, kind, need, message):
    own.write_text(re.sub(rf"(@needs.*\n)?def {kind}\(", f"@needs({need})\ndef {kind}(", OWN))
    values = places(own)
    for refuse in (lambda: startup_checks.check_method(configured(values)), lambda: make(half(12), **values)):
        with pytest.raises(ConfigError) as error:
            refuse()
        assert message in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("surrogate", "message"),
    [
        ("all_row=True", "@needs: unknown name 'all_row'; did you mean 'all_rows'? (own.py, line 3)"),
        ("scores=True", "@needs(scores=...) has no meaning for this kind of function: there are fused"),
    ],
)
def test_a_surrogate_that_needs_what_there_is_not_is_refused_before_the_run(tmp_path, surrogate, message):
    path = tmp_path / "own.py"
    path.write_text(
        f"from exgrpo.train.common.functions import needs\n\n@needs({surrogate})\ndef own(tokens, options):\n    pass\n"
    )
    with pytest.raises(ConfigError) as error:
        startup_checks.check_surrogate(configured({"objective": {"surrogate": f"{path}:own"}}))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("admit", "return True", "it gave True (bool); it gives an array with a bool for each of the 12 rows"),
        ("admit", "return batch.reward", "it gave an array [12] of float64; it gives an array with a bool for each"),
        ("admit", "return batch.fresh & batch.loss_mask", "loss_mask of the batch is not filled yet ({line})"),
        ("admit", "return batch.rewards > 0", "a StepBatch has no rewards ({line}); there are answers, chosen_entropy"),
        ("prioritise", "return -candidates.count", "it gave an array [{number}] of float64; it gives Priority("),
        ("prioritise", "return Priority(candidates.count[1:])", "it gave an array [{number}] of float64 in a Priority"),
        ("prioritise", "return Priority(candidates.count[:1], candidates.question)", "its strata are {number}"),
        ("prioritise", "return Priority(candidates.lenght)", "candidates have no lenght ({line}); there are"),
        ("prioritise", "return Priority(candidates.count * np.nan)", "a logarithm of a weight is nan"),
        ("prioritise", "return Priority(candidates.count - np.inf)", "all logarithms of weights are -inf"),
        ("compose", "return planner.fresh(3)[0]", "(PlannedGroup); it gives a list of PlannedGroup, as planner.fresh"),
        ("compose", "return []", "it plans no fresh answer, and not all questions are retired; it gives a list"),
        ("compose", "return [PlannedGroup(12, 4)]", "fresh=4, choose=0, rows=()), and questions are 0 to 11"),
        ("compose", "return [PlannedGroup(3, 2, 9)]", "choose=9, rows=()), and stored of that question are the rows"),
        ("compose", "return [PlannedGroup(3, 2, rows=(999,))]", "rows=(999,)), and stored of that question are the ro"),
        ("settle", "return [True]", "it gave True (bool) in its list; it gives a list of numbers of graded groups"),
        ("settle", "return [0, 3]", "it gave the groups [0, 3], and there are 3, from 0, each of which counts once"),
        ("settle", "return [*np.arange(2), 1]", "it gave the groups [0, 1, 1], and there are 3"),
        ("settle", "return planner.fresh(1)", "fresh=4, choose=0, rows=()) when all have been graded; it gives a list"),
        ("settle", "return [PlannedGroup(0, 0, 2)]", "fresh=0, choose=2, rows=()) when all have been graded; it gives"),
        ("expire", "return candidates.replays > 1", "it gave an array [{number}] of bool; it gives Expired(rows"),
        ("expire", "return Expired(candidates.replays[1:] > 1)", "it gave an array [{number}] of bool as its rows;"),
        ("expire", "return Expired(None, [3])", "it gave [3] (list) as its questions; it gives Expired(rows"),
        ("expire", "return Expired(None, np.array([99]))", "some are none of the 12 questions, which are 0 to 11"),
        ("weigh", "return None", "it gave None (NoneType); it gives Weighed("),
        ("weigh", "return Weighed(batch.log_prob)", '({line}); `log_prob` of the batch needs @needs(present="values")'),
        ("weigh", f"return Weighed({PAST}[1:])", "it gave an array [{number}] of float32 as its reference; it gives"),
        ("weigh", f"return Weighed({PAST}, advantage=7.0)", "it gave 7.0 (float) as its advantage; it gives Weighed("),
        ("weigh", f"return Weighed({PAST} * np.nan)", "a log-prob of the reference is nan"),
        ("weigh", f"return Weighed({PAST}, np.full(len({PAST}), 1e39))", "a factor of the advantage is inf"),
        ("weigh", f"return Weighed({PAST}, -{PAST}**0)", "a factor of an answer's own advantage is negative: -1.0"),
        ("weigh", f"return Weighed({PAST}, advantage=batch.reward - np.inf)", "an advantage is -inf"),
    ],
)
def test_what_a_function_does_wrong_is_told_before_there_is_a_model(own, kind, body, message):
    arguments = next(line for line in OWN.splitlines() if line.startswith(f"def {kind}("))
    own.write_text("import numpy as np\n" + OWN.replace(arguments, f"{arguments}\n    {body}"))
    line = next(number for number, text in enumerate(own.read_text().splitlines(), 1) if text == f"    {body}")
    with pytest.raises(ConfigError) as error:
        startup_checks.check_method(configured(places(own), {"rollout": {"samples": 4}}))
    said = str(error.value)
    option = {"weigh": "objective.weigh", "settle": "experience.compose"}.get(kind, f"experience.{kind}")
    place = f"{own}:{kind}: " if kind != "settle" else f"{own}:compose, settle: "
    assert said.startswith(f"{option} {place}") or "questions, which" in said
    expected = re.escape(message.replace("{line}", f"own.py, line {line}")).replace(re.escape("{number}"), r"\d+")
    assert re.search(expected, said), said
    assert "\n" not in said


def test_replayed_rows_cannot_be_stored_again(own):
    own.write_text(OWN.replace("batch.fresh & (batch.reward < options.success)", "batch.reward < options.success"))
    with pytest.raises(ConfigError, match="admit: it stores replayed rows, and only fresh ones can be stored$"):
        startup_checks.check_method(configured(places(own, compose="mixed")))


@pytest.mark.parametrize("kind", ["admit", "prioritise", "compose", "settle", "weigh", "expire"])
def test_a_function_that_takes_other_arguments_is_refused(own, kind):
    own.write_text(re.sub(rf"def {kind}\(.*\)", f"def {kind}(a, b, c)", OWN))
    with pytest.raises(ConfigError, match=r"it takes \(a, b, c\), and it is called with \(\w+(, \w+)?\)$"):
        startup_checks.check_method(configured(places(own)))


@pytest.mark.parametrize("shares", [{"compose": "bapo", "ratio": 0.01}, {"compose": "buffer", "repeat": 0.01}])
def test_functions_that_do_not_go_together_are_told_before_the_run_however_little_is_replayed(shares):
    values = {"prioritise": "advantage", "advantage": "stored", "band": (0.99, 1.0), **shares}
    with pytest.raises(ConfigError, match="prioritise looks at 'advantage', which is not known of what is drawn here"):
        startup_checks.check_method(configured({"experience": values}))
