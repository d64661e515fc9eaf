"""Where the scores of fresh answers come from, and that it makes no difference."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from exgrpo.train.common.records import Rollout
from exgrpo.train.config.recipe import merged, read_recipe
from exgrpo.train.replay import Replay
from tests.train.batches import same, stored_rows
from tests.train.fakes import fake_score
from tests.train.trainers import K, half, make

FOLDER = Path(__file__).parents[3] / "recipes" / "replay"


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
    own = {
        "experience": {"start_pass_rate": 0.0},
        "objective": {"entropy_coef": 0.0},
        "optimizer": {"minibatches": minibatches},
        "rollout": {"samples": K, "max_tokens": 8, "behaviour": behaviour},
    }
    values = merged(read_recipe(FOLDER / f"{recipe}.yaml"), own)
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
    of_row = {
        right: [
            batch.row_values(row, entropy).mean()
            for row in range(len(batch))
            if batch.question[batch.group[row]] == 1 and batch.reward[row] == right
        ]
        for right in (0, 1)
    }
    assert result.metrics["entropy_gap"] == pytest.approx(np.mean(of_row[0]) - np.mean(of_row[1]), rel=1e-5)
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
