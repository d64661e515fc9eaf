"""Steps of the trainer: where the scores of fresh answers come from, which makes no difference, and objectives.

The recipes of objectives go with every task, and drive the loop as they say.
"""

import dataclasses
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from exgrpo.train.common import functions
from exgrpo.train.common.records import Rollout
from exgrpo.train.config.recipe import merged, parse_args, read_recipe
from exgrpo.train.config.replay import Baseline
from exgrpo.train.policy.scores import Reference
from exgrpo.train.replay import Replay
from tests.train.batches import Row, make_batch, rows_of, same, stored_rows, trajectories
from tests.train.fakes import fake_score
from tests.train.trainers import K, half, make, updated

REPLAY = Path(__file__).parents[3] / "recipes" / "replay"


def stored(trainer):
    return stored_rows(trainer.replay.memory.table.stored())


def metrics_of(result):
    """Without what tells of time and work; NaN as text, for it is not equal to itself."""
    left_out = ("seconds", "mfu", "tokens_per_second")
    return {name: str(value) for name, value in result.metrics.items() if not name.startswith(left_out)}


def passes(trainer):
    """How many sequences each pass has scored."""
    return [len(batch) for batch, _ in trainer.policy.scored if len(batch)]


@pytest.mark.parametrize(
    ("sections", "scored", "all_scored"),
    [
        ({"optimizer": {"minibatches": 2}}, 12, 24),
        ({"optimizer": {"minibatches": 3, "passes": 2}}, 16, 24),
        ({"optimizer": {"minibatches": 2}, "objective": {"entropy_coef": 0.0}}, 12, 24),
        ({"optimizer": {"minibatches": 1}, "objective": {"entropy_coef": 0.0}, "skill": {0: 1.0, 1: 0.0}}, 4, 20),
    ],
)
def test_the_first_optimiser_step_tells_its_rows_and_a_pass_before_it_the_others(sections, scored, all_scored):
    """All numbers of the step are those with a pass over all rows that need scores."""
    skill = {**half(6), **sections.get("skill", {})}
    sections = {name: section for name, section in sections.items() if name != "skill"}
    trainer, other = make(skill, **sections), make(skill, **sections)
    other.scorer.own_forward = False
    for step in (1, 2):
        version = trainer.policy.version
        for one in (trainer, other):
            one.policy.updates.clear()
            one.policy.scored.clear()
        ours, theirs = (metrics_of(one.step(step)) for one in (trainer, other))
        assert ours == theirs
        if step == 1:
            assert (passes(trainer), passes(other)) == ([scored], [all_scored])
        assert len(trainer.policy.updates) == len(other.policy.updates)
        for number, ((ours, _), (theirs, _)) in enumerate(
            zip(trainer.policy.updates, other.policy.updates, strict=True)
        ):
            expected = theirs.batch.ratio_log_prob.copy()
            if number == 0:
                at = theirs.batch.places(np.flatnonzero(theirs.batch.fresh))
                np.testing.assert_array_equal(expected[at], fake_score(theirs.batch.token, version).log_prob[at])
                expected[at] = np.inf
            np.testing.assert_array_equal(ours.batch.ratio_log_prob, expected)
    assert all(map(same, stored(trainer), stored(other)))
    assert len(stored(trainer)) == len(stored(other))


SKILL = {0: 1.0, 1: 0.75, 2: 0.5, 3: 0.25, 4: 0.0, 5: 0.0}
MIXED, RIGHT, ALL = {1, 2, 3}, {0, 1, 2, 3}, set(SKILL)
NO_BONUS, ONE = {"entropy_coef": 0.0}, {"minibatches": 1}


@pytest.mark.parametrize(
    ("trained", "stored_of", "sections"),
    [
        (MIXED, RIGHT, {"objective": NO_BONUS}),
        (MIXED, RIGHT, {"objective": NO_BONUS, "optimizer": ONE}),
        (MIXED, set(), {"objective": NO_BONUS, "experience": {"ratio": 0.0}}),
        (MIXED, set(), {"objective": NO_BONUS, "experience": {"start_pass_rate": 0.9}}),
        (MIXED, set(), {"objective": NO_BONUS, "rollout": {"behaviour": "engine"}}),
        (ALL, RIGHT, {"objective": {"entropy_coef": 0.1}, "optimizer": ONE}),
        (ALL, set(), {"objective": {"entropy_coef": 0.1}, "rollout": {"behaviour": "engine"}, "optimizer": ONE}),
        ({1}, RIGHT, {"objective": {**NO_BONUS, "train_on": "easy"}}),
        (set(), RIGHT, {"objective": {**NO_BONUS, "train_on": "easy"}, "skill": {1: 0.0}}),
        (set(), RIGHT, {"objective": {"entropy_coef": 0.1}, "skill": {1: 1.0, 2: 1.0, 3: 0.0}}),
        (MIXED, MIXED, {"objective": NO_BONUS, "experience": {"admit": "with_advantage"}}),
        (MIXED, ALL, {"objective": NO_BONUS, "experience": {"admit": "all", "compose": "buffer"}}),
        ({1, 2}, RIGHT, {"objective": NO_BONUS, "questions": 2, "rollout": {"refills": 8}, "optimizer": ONE}),
    ],
)
def test_answers_are_scored_that_are_trained_on_or_stored(trained, stored_of, sections):
    """Of the questions `trained`, all answers; of `stored_of` the successes, or all where `admit` takes failures."""
    skill = {**SKILL, **sections.get("skill", {})}
    trainer = make(skill, **{name: section for name, section in sections.items() if name != "skill"})
    batch = trainer.step(1).batch
    question = batch.question[batch.group]
    if "refills" in sections.get("rollout", {}):  # which of them are asked first, is drawn
        with_signal = [q for q in batch.question.tolist() if q in MIXED]
        trained = set(with_signal[:2])
    successes = sections.get("experience", {}).get("admit") is None
    expected = np.isin(question, list(trained))
    expected |= np.isin(question, list(stored_of)) & ((batch.reward == 1) | (not successes))
    expected &= batch.fresh
    known = batch.by_token(expected)
    for values in (batch.log_prob, batch.entropy):
        np.testing.assert_array_equal(~np.isnan(values), known)
    score = fake_score(batch.token, 0)
    np.testing.assert_array_equal(batch.log_prob[known], score.log_prob[known])
    np.testing.assert_array_equal(batch.entropy[known], score.entropy[known])
    told = 0 if not trainer.policy.updates else len(trainer.policy.updates[0][0].batch)
    own = trainer.scorer.own_forward
    assert sum(passes(trainer)) == expected.sum() - (told if own else 0)


class ScoresAll(Replay):
    """A method with a function that reads the scores of all answers."""

    needs_scores = True


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("behaviour", ["trainer", "engine"])
@pytest.mark.parametrize("recipe", ["on_policy", "exgrpo", "bapo", "rollout_level", "dynamic_sampling", "arnal_fifo"])
def test_leaving_answers_out_changes_no_update_and_nothing_that_is_stored(recipe, behaviour, minibatches):
    own = {"experience": {"start_pass_rate": 0.0}, "objective": NO_BONUS, "optimizer": {"minibatches": minibatches}}
    own |= {"rollout": {"samples": K, "max_tokens": 8, "behaviour": behaviour}}
    values = merged(read_recipe(REPLAY / f"{recipe}.yaml"), own)
    skill = dict(enumerate([0.0, 0.25, 0.0, 1.0, 0.0, 0.5, 0.0, 0.0, 0.25, 0.0, 0.0, 0.0, 0.75, 0.0] * 2))
    ours, theirs = make(skill, **values), make(skill, **values)
    theirs.replay.__class__ = ScoresAll
    for step in range(1, 5):
        ours.step(step)
        theirs.step(step)
    if recipe != "arnal_fifo" or behaviour == "engine":  # it stores every answer
        assert sum(passes(ours)) < sum(passes(theirs))
    assert len(ours.policy.updates) == len(theirs.policy.updates) > 0
    for (one, _), (other, _) in zip(ours.policy.updates, theirs.policy.updates, strict=True):
        assert (one.normalizer, one.tokens) == (other.normalizer, other.tokens)
        names = ("token", "advantage", "ratio_log_prob", "factor")[: 3 + one.batch.has("factor")]
        assert one.batch.has("factor") == other.batch.has("factor")
        for name in names:
            np.testing.assert_array_equal(getattr(one.batch, name), getattr(other.batch, name))
            assert not np.isnan(getattr(one.batch, name)).any()
    for one, other in zip(stored(ours), stored(theirs), strict=True):
        assert same(one, other)


def test_entropies_are_means_over_the_answers_that_are_scored():
    """Question 0 is all right and stored, 1 is half right, 2 is all wrong and left out."""
    trainer = make({0: 1.0, 1: 0.5, 2: 0.0}, questions=3, objective=NO_BONUS, optimizer=ONE)
    result = trainer.step(1)
    batch = result.batch
    entropy = fake_score(batch.token, 0).entropy
    known = batch.by_token(batch.question[batch.group] != 2)
    assert result.metrics["entropy"] == pytest.approx(entropy[known].mean())
    means = np.array([batch.row_values(row, entropy).mean() for row in range(len(batch))])
    wrong, right = (means[(batch.question[batch.group] == 1) & (batch.reward == reward)] for reward in (0, 1))
    assert result.metrics["entropy_gap"] == pytest.approx(wrong.mean() - right.mean(), rel=1e-5)
    nothing = make({0: 0.0, 1: 0.0, 2: 0.0}, questions=3, objective=NO_BONUS, optimizer=ONE)
    assert np.isnan(nothing.step(1).metrics["entropy"])
    assert passes(nothing) == []


class Exact:
    """Gives the scores with the answers, as far from the trainer's as it is told."""

    def __init__(self, engine, gap):
        self._engine, self._gap, self.version = engine, gap, 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def generate(self, requests):
        for answer in self._engine.generate(requests):
            score = fake_score(answer.rollout.response, self.version)
            rollout = Rollout(answer.rollout.response, True, score.log_prob + self._gap, score.entropy)
            yield dataclasses.replace(answer, rollout=rollout)


@pytest.mark.parametrize(("gap", "scored"), [(0.99e-4, [2]), (1.01e-4, [2, 12])])
def test_an_engine_with_the_trainers_arithmetic_is_believed_after_a_sample(gap, scored):
    trainer = make(half(20))
    trainer.rollout_worker.engine = Exact(trainer.rollout_worker.engine, np.float32(gap))
    result = trainer.step(1)
    assert passes(trainer) == scored
    assert result.metrics["mismatch/mean"] == pytest.approx(gap, rel=0.01)
    for trajectory in stored(trainer):
        own = fake_score(trajectory.response, 0).log_prob
        np.testing.assert_allclose(trajectory.log_prob, own, atol=1e-4)


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
