"""The recipes of objectives: each goes with every task, and drives the loop as it says."""

from pathlib import Path

import numpy as np
import pytest

from exgrpo.train import builtin
from exgrpo.train.policy.batch import TrainingRow
from exgrpo.train.policy.reference import Reference
from exgrpo.train.recipe import parse_args
from tests.train.fakes import fake_score
from tests.train.trainers import K, half, make

FOLDER = Path(__file__).parents[3] / "recipes" / "objectives"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("task", builtin.model_names())
@pytest.mark.parametrize("name", RECIPES)
def test_every_objective_goes_with_every_task(name, task):
    config = parse_args(["--recipe", f"builtin:{task}", "--recipe", str(FOLDER / f"{name}.yaml")])
    assert config.data.train == (f"builtin:{task}",)


def rows(trainer):
    return [row for minibatch, _ in trainer.policy.updates for row in minibatch.rows]


def test_each_pass_has_all_answers_in_an_order_of_its_own():
    trainer = make(half(20), optimizer={"minibatches": 2, "passes": 3}, experience={"ratio": 0})
    trainer.step(1)
    batches = [minibatch for minibatch, _ in trainer.policy.updates]
    assert len(batches) == 6
    orders = [[id(row.response) for part in batches[i : i + 2] for row in part.rows] for i in (0, 2, 4)]
    assert len(set(map(tuple, orders))) == 3
    assert len({frozenset(order) for order in orders}) == 1
    assert len(orders[0]) == 6 * K
    olds = {}
    for row in rows(trainer):
        assert olds.setdefault(id(row.response), row.old_log_prob) is row.old_log_prob


def test_the_penalty_of_length_counts_in_advantages_and_not_in_successes():
    trainer = make(half(20), objective={"overlong_tokens": 4, "overlong_penalty": 0.5})
    result = trainer.step(1)
    assert result.metrics["pass_rate"] == 0.5
    of_question = {
        question: list(answers) for question, answers in zip(result.questions, result.answers.of_question, strict=True)
    }
    for row in rows(trainer):
        answers = of_question[int(row.prompt[0])]
        net = {id(a.rollout.response): a.reward - 0.5 * max(len(a.rollout.response) - 4, 0) / 4 for a in answers}
        assert row.advantage == pytest.approx(net[id(row.response)] - np.mean(list(net.values())), abs=1e-6)
    stored = [t for q in result.questions for t in trainer.replay.memory.trajectories(q)]
    assert len(stored) == 6 * K / 2
    assert any(one.penalty > 0 for one in stored)


def tokens(row):
    return row.response.tolist()


@pytest.mark.parametrize("leave_one_out", [True, False])
def test_stored_advantages_are_those_of_the_loss(leave_one_out):
    baseline = "leave_one_out" if leave_one_out else "mean"
    experience = {"ratio": 0.5, "start_pass_rate": 0, "admit": "all", "advantage": "stored"}
    trainer = make(half(20), objective={"baseline": baseline, "overlong_tokens": 4}, experience=experience)
    trainer.step(1)
    table = trainer.replay.memory.table
    stored = list(zip(map(tokens, table.stored()), table.column("advantage"), strict=True))
    trained = [(tokens(row), row.advantage) for row in rows(trainer)]
    assert len(stored) == len(trained)
    for one, other in zip(sorted(stored), sorted(trained), strict=True):
        assert one[0] == other[0]
        assert one[1] == pytest.approx(other[1], abs=1e-6)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_nothing_is_learnt_from_answers_that_were_cut(monkeypatch, minibatches):
    engine_rows = {}
    optimizer = {"minibatches": minibatches}
    trainer = make(half(20), objective={"overlong_filter": True}, experience={"ratio": 0}, optimizer=optimizer)
    groups = trainer._groups

    def cut_first(*args):
        found = groups(*args)
        for group in found:
            object.__setattr__(group.fresh[0], "finished", False)
            engine_rows[id(group.fresh[0].response)] = group.fresh[0].reward
        return found

    monkeypatch.setattr(trainer, "_groups", cut_first)
    trainer.step(1)
    trained = rows(trainer)
    assert len(trained) == 6 * (K - 1)
    assert not {id(row.response) for row in trained} & set(engine_rows)
    # Their rewards count: two of four are right.
    assert {abs(row.advantage) for row in trained} == {0.5}


def test_answers_have_the_references_log_probs_beside_them():
    trainer = make(half(20), objective={"kl_coef": 0.1, "entropy_coef": 0.0})
    trainer.reference = Reference(lambda sequences: [fake_score(one.response, 99) for one in sequences])
    trainer.step(1)
    trainer.policy.updates.clear()
    trainer.step(2)
    assert sum(row.replayed for row in rows(trainer)) == 3
    for row in rows(trainer):
        if row.replayed:
            assert row.reference_log_prob is None
        else:
            np.testing.assert_array_equal(row.reference_log_prob, fake_score(row.response, 99).log_prob)


def test_the_reference_does_not_read_what_nothing_is_learnt_from():
    prompt, response = np.arange(2, dtype=np.int32), np.arange(3, dtype=np.int32)
    kept, replayed, masked = (
        TrainingRow(prompt, response, np.zeros(3, np.float32), 1.0, replayed=replayed, masked=masked)
        for replayed, masked in ((False, False), (True, False), (False, True))
    )
    asked = []
    reference = Reference(lambda rows: asked.extend(rows) or [fake_score(row.response, 0) for row in rows])
    ((first, *others),) = reference.beside([[kept, replayed, masked]])
    assert asked == [kept]
    np.testing.assert_array_equal(first.reference_log_prob, fake_score(response, 0).log_prob)
    assert others == [replayed, masked]
