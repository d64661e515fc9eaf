"""Where the scores of fresh answers come from, and that it makes no difference."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from exgrpo.train.common.records import Rollout
from tests.train.fakes import fake_score
from tests.train.trainers import half, make, updated


def stored(trainer):
    return [t for q in range(20) for t in trainer.replay.memory.trajectories(q)]


def plain(trajectory):
    """A stored answer, to be compared."""
    return SimpleNamespace(**{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(trajectory).items()})


def metrics_of(result):
    """Without what tells of time and work; NaN as text, for it is not equal to itself."""
    left_out = ("seconds", "mfu", "tokens_per_second")
    return {name: str(value) for name, value in result.metrics.items() if not name.startswith(left_out)}


def passes(trainer):
    """How many sequences each pass has scored."""
    return [len(batch) for batch, _ in trainer.policy.scored if len(batch)]


def test_the_only_optimiser_step_tells_the_scores():
    """No pass but its own; its rows refer to the policy itself, and what is stored is that policy's."""
    trainer = make(half(20), optimizer={"minibatches": 1})
    metrics = trainer.step(1).metrics
    assert passes(trainer) == []
    ((minibatch, _),) = trainer.policy.updates
    assert np.isposinf(minibatch.batch.ratio_log_prob).all()
    expected = fake_score(minibatch.batch.token, 0).entropy
    assert metrics["entropy"] == pytest.approx(expected.mean())
    assert stored(trainer)
    for trajectory in stored(trainer):
        np.testing.assert_array_equal(trajectory.log_prob, fake_score(trajectory.response, 0).log_prob)


@pytest.mark.parametrize(
    ("sections", "scored"),
    [
        ({"optimizer": {"minibatches": 2}}, 12),
        ({"optimizer": {"minibatches": 3, "passes": 2}}, 16),
        ({"optimizer": {"minibatches": 2}, "objective": {"entropy_coef": 0.0}}, 12),
        ({"optimizer": {"minibatches": 1}, "objective": {"entropy_coef": 0.0}, "skill": {0: 1.0, 1: 0.0}}, 8),
    ],
)
def test_the_first_optimiser_step_tells_its_rows_and_a_pass_before_it_the_others(sections, scored):
    """All numbers of the step are those with a pass over all rows."""
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
            assert (passes(trainer), passes(other)) == ([scored], [24])
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
    assert [vars(t) for t in map(plain, stored(trainer))] == [vars(t) for t in map(plain, stored(other))]


def test_replayed_rows_refer_to_the_policy_that_wrote_them():
    trainer = make(half(20), optimizer={"minibatches": 1})
    trainer.step(1)
    past = {t.response.tobytes(): t.log_prob for t in stored(trainer)}
    trainer.step(2)
    rows = [row for row in updated(trainer) if row.replayed]
    assert rows
    for row in rows:
        np.testing.assert_array_equal(row.ratio_log_prob, past[row.token.tobytes()])


@pytest.mark.parametrize(
    "sections",
    [
        {"optimizer": {"minibatches": 1}, "objective": {"train_on": "easy"}},
        {"optimizer": {"minibatches": 1}, "rollout": {"behaviour": "engine"}},
    ],
)
def test_where_it_cannot_tell_all_a_pass_does(sections):
    trainer = make(half(20), **sections)
    trainer.step(1)
    assert passes(trainer) == [24]


def test_a_step_from_which_nothing_is_learnt_is_scored_by_a_pass():
    trainer = make(dict.fromkeys(range(20), 1.0), optimizer={"minibatches": 1})
    trainer.step(1)
    assert trainer.policy.updates == []
    assert passes(trainer) == [24]


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


@pytest.mark.parametrize(("gap", "scored"), [(9e-6, [2]), (1e-4, [2, 12])])
def test_an_engine_with_the_trainers_arithmetic_is_believed_after_a_sample(gap, scored):
    trainer = make(half(20))
    trainer.answerer.engine = Exact(trainer.answerer.engine, np.float32(gap))
    result = trainer.step(1)
    assert passes(trainer) == scored
    assert result.metrics["mismatch/mean"] == pytest.approx(gap, rel=0.1)
    for trajectory in stored(trainer):
        own = fake_score(trajectory.response, 0).log_prob
        np.testing.assert_allclose(trajectory.log_prob, own, atol=1e-5)
