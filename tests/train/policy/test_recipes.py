"""The recipes of objectives: each goes with every task, and drives the loop as it says."""

from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from exgrpo.train.common import functions
from exgrpo.train.config.recipe import parse_args
from exgrpo.train.config.replay import Baseline
from exgrpo.train.policy.scores import Reference
from tests.train.batches import Row, make_batch, rows_of, trajectories
from tests.train.fakes import fake_score
from tests.train.trainers import K, half, make, updated

FOLDER = Path(__file__).parents[3] / "recipes" / "objectives"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("task", functions.model_names())
@pytest.mark.parametrize("name", RECIPES)
def test_every_objective_goes_with_every_task(name, task):
    config = parse_args(["--recipe", f"builtin:{task}", "--recipe", str(FOLDER / f"{name}.yaml")])
    assert config.data.train == (f"builtin:{task}",)


def test_each_pass_has_all_answers_in_an_order_of_its_own():
    trainer = make(half(20), optimizer={"minibatches": 2, "passes": 3}, experience={"ratio": 0})
    trainer.step(1)
    batches = [minibatch for minibatch, _ in trainer.policy.updates]
    assert len(batches) == 6
    orders = [[int(i) for part in batches[i : i + 2] for i in part.rows] for i in (0, 2, 4)]
    assert len(set(map(tuple, orders))) == 3
    assert all(sorted(order) == list(range(6 * K)) for order in orders)
    assert np.isposinf(batches[0].batch.ratio_log_prob).all(), "it sees the policy before the update itself"
    for minibatch in batches[1:]:
        np.testing.assert_array_equal(minibatch.batch.ratio_log_prob, fake_score(minibatch.batch.token, 0).log_prob)


def test_the_penalty_of_length_counts_in_advantages_and_not_in_successes():
    trainer = make(half(20), objective={"overlong_tokens": 4, "overlong_penalty": 0.5})
    result = trainer.step(1)
    assert result.metrics["pass_rate"] == 0.5
    batch = result.batch
    net = batch.reward - 0.5 * np.maximum(batch.length - 4, 0) / 4
    expected = (net.reshape(-1, K) - net.reshape(-1, K).mean(1, keepdims=True)).ravel()
    for minibatch, _ in trainer.policy.updates:
        np.testing.assert_allclose(minibatch.batch.advantage, expected[minibatch.rows], atol=1e-6)
    stored = [t for q in batch.question for t in trajectories(trainer.replay.memory, q)]
    assert len(stored) == 6 * K / 2
    assert any(one.penalty > 0 for one in stored)


@pytest.mark.parametrize("baseline", get_args(Baseline))
def test_stored_advantages_are_those_of_the_loss(baseline):
    experience = {"ratio": 0.5, "start_pass_rate": 0, "admit": "all", "advantage": "stored"}
    objective = {"baseline": baseline, "beta1": 0.5, "overlong_tokens": 4}
    trainer = make(half(20), objective=objective, experience=experience)
    trainer.step(1)
    table = trainer.replay.memory.table
    stored = [(row.token.tolist(), row.advantage) for row in rows_of(table.stored())]
    trained = [(row.token.tolist(), row.advantage) for row in updated(trainer)]
    assert len(stored) == len(trained)
    for one, other in zip(sorted(stored), sorted(trained), strict=True):
        assert one[0] == other[0]
        assert one[1] == pytest.approx(other[1], abs=1e-6)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_nothing_is_learnt_from_answers_that_were_cut(monkeypatch, minibatches):
    optimizer = {"minibatches": minibatches}
    trainer = make(half(20), objective={"overlong_filter": True}, experience={"ratio": 0}, optimizer=optimizer)
    join = trainer.rollout_worker.join

    def cut_first(produced):
        batch = join(produced)
        batch.finished[::K] = False
        return batch

    monkeypatch.setattr(trainer.rollout_worker, "join", cut_first)
    trainer.step(1)
    trained = np.concatenate([minibatch.rows for minibatch, _ in trainer.policy.updates])
    assert sorted(trained) == [i for i in range(6 * K) if i % K]
    # Their rewards count: two of four are right.
    assert {abs(row.advantage) for row in updated(trainer)} == {0.5}


def test_answers_have_the_references_log_probs_beside_them():
    trainer = make(half(20), objective={"kl_coef": 0.1, "entropy_coef": 0.0})
    trainer.reference = Reference(lambda batch: fake_score(batch.token, 99))
    trainer.step(1)
    trainer.policy.updates.clear()
    trainer.step(2)
    assert sum(row.replayed for row in updated(trainer)) == 3
    for row in updated(trainer):
        expected = np.full(len(row.token), np.nan) if row.replayed else fake_score(row.token, 99).log_prob
        np.testing.assert_array_equal(row.reference_log_prob, expected)


def test_the_reference_does_not_read_what_nothing_is_learnt_from():
    groups = [(0, [Row(), Row(), Row(replayed=True)]), (1, [Row()]), (2, [Row()])]
    batch = make_batch(groups, loss_mask=[True, False, True, True, True])
    batch.fill(trained=np.array([2, 0]))
    asked = []
    reference = Reference(lambda part: asked.append(part.group.tolist()) or fake_score(part.token, 0))
    assert reference.fill(batch).tolist() == [4, 0]
    assert asked == [[2, 0]]
    for i, row in enumerate(rows_of(batch)):
        expected = fake_score(row.token, 0).log_prob if i in (0, 4) else np.full(2, np.nan)
        np.testing.assert_array_equal(row.reference_log_prob, expected)


@pytest.mark.parametrize(("surrogate", "rows"), [("clipped", 0), ("oapl", 6 * K)])
def test_groups_that_are_all_right_teach_a_regression_alone(surrogate, rows):
    objective = {"surrogate": surrogate, "baseline": "log_mean_exp", "normalize": "answer", "entropy_coef": 0.0}
    trainer = make(dict.fromkeys(range(20), 1.0), objective=objective, experience={"ratio": 0})
    metrics = trainer.step(1).metrics
    assert len(updated(trainer)) == rows
    assert metrics["idle_group_fraction"] == (0 if rows else 1)
    assert all((row.advantage, row.weight) == (0, 1) for row in updated(trainer))


@pytest.mark.parametrize(("weigh", "anchor"), [("clipped", "writer"), ("shaped", "writer"), ("clipped", "start")])
def test_coupled_answers_have_the_mean_log_ratio_of_their_groups_in_their_advantages(weigh, anchor):
    """Of the answers that the regression is of: stored ones with a term of their own keep their advantages.

    Ratios refer to the policy that has written the answers, or to the start of the run.
    """
    objective = {"surrogate": "coupled", "weigh": weigh, "anchor": anchor, "beta2": 0.5, "entropy_coef": 0.0}
    trainer = make(half(20), objective={**objective, "normalize": "answer"}, experience={"ratio": 1.0})
    trainer.reference = Reference(lambda batch: fake_score(batch.token, 99))
    trainer.step(1)
    if anchor == "writer":
        assert len(trainer.policy.scored) == 2, "for the stored answers, and for the second optimiser step"
    version = trainer.policy.version
    trainer.policy.updates.clear()
    batch = trainer.step(2).batch
    plain = batch.reward - batch.mean(batch.reward)[batch.group]
    assert any(row.replayed for row in updated(trainer))
    for number, (minibatch, _) in enumerate(trainer.policy.updates):
        rows = minibatch.batch
        start, now = (fake_score(rows.token, which).log_prob for which in (99, version + number))
        if anchor == "start":
            np.testing.assert_array_equal(rows.ratio_log_prob, start)
        reference = np.where(np.isposinf(rows.ratio_log_prob), now, rows.ratio_log_prob)
        moved = np.add.reduceat((now - reference).astype(np.float64), rows.start[:-1])
        among = rows.fresh | (weigh == "clipped")
        rest = plain[minibatch.rows] - 0.5 * moved
        expected = plain[minibatch.rows] - among * rows.mean(rest, among)[rows.group]
        np.testing.assert_allclose(rows.advantage, expected, atol=1e-5)
        assert np.abs(moved).max() > 0.01
