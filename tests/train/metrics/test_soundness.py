"""Steps that teach nothing: they are told, and end the run."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from exgrpo.train.common.records import Counts, EngineCounts, Failure
from exgrpo.train.metrics.soundness import Soundness, overflowed
from exgrpo.train.rollout.answers import RolloutWorker
from tests.train.fakes import ScriptedGrader
from tests.train.trainers import half, make


def ten(*, failed: int = 0, slow: int = 0) -> Counts:
    """Those of a step of ten answers."""
    failures = (Failure("r", "KeyError: 1", "q", "g", "a", failed), Failure("r", "late", "q", "g", "a", slow))
    told = tuple(failure for failure in failures if failure.count)
    return Counts(10, slow, failed, 0.0, 0.0, EngineCounts(), failures=told)


@pytest.mark.parametrize(
    ("most", "failed", "expected"),
    [
        (0.5, [6, 6, 6], 3),
        (0.5, [5, 5, 5, 5], None),
        (0.5, [10, 10, 5, 10, 10], None),
        (0.5, [0, 10, 0, 6, 7, 8, 9], 6),
        (0.0, [1, 1, 1], 3),
        (1.0, [10] * 9, None),
    ],
)
@pytest.mark.parametrize("how", ["failed", "slow"])
def test_three_steps_in_a_row_with_more_failures_than_are_borne_end_the_run(most, failed, expected, how):
    soundness, stops = Soundness(most), []
    for number, counts in enumerate((ten(**{how: count}) for count in failed), start=1):
        soundness.observe(counts, (True,))
        stops += [number] if soundness.problem(counts) else []
    assert next(iter(stops), None) == expected


def test_steps_that_overflow_fp16_are_told_with_their_loss_scales():
    def step(applied, scale):
        return SimpleNamespace(applied=applied, loss_scale=scale)

    assert overflowed([step(True, 2.0**16), step(False, math.nan)]) is None
    told = overflowed([step(True, 2.0**16), step(False, 2.0**16)])
    assert told.startswith("an optimiser step was skipped, because the gradient is beyond the range of fp16 at a loss")
    told = overflowed([step(False, 2.0**16), step(False, 2.0**15), step(True, 2.0**14)])
    assert told.startswith("2 optimiser steps were skipped, ")
    assert "a loss scale of 65536, 32768; " in told


def test_skipped_optimiser_steps_are_told_after_three_and_end_the_run_after_ten():
    soundness, told = Soundness(0.5), []
    steps = [(True, False, False), (True,), (False, False), (), (False, False), (False,) * 4]
    for applied in steps:
        told.append(soundness.observe(ten(), applied) is not None)
        assert soundness.problem(ten()) is None
    assert told == [False] * 4 + [True, False], "a step without an update is neither"
    assert soundness.observe(ten(), (False,) * 2) is None
    assert "the last 10 optimiser steps were skipped" in soundness.problem(ten())


def test_a_training_step_says_which_of_its_optimiser_steps_were_applied():
    trainer = make(half(30))
    applied = [trainer.step(number).applied for number in (1, 2, 3)]
    assert applied == [(True, True), (False, True), (True, False)]  # the recording policy skips every third


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_steps_without_an_advantage_take_no_optimiser_step_and_say_why(reward):
    """Equal rewards are no signal, whatever they are; 0.1 is no binary fraction, so its mean is a rounded one."""
    trainer = make(half(30), rollout={"samples": 7})
    trainer.rollout_worker.grader = ScriptedGrader(lambda text: reward)
    notes = {}
    for step in range(1, 10):
        if (result := trainer.step(step)) is None:
            break
        assert trainer.policy.version == 0
        assert result.metrics["idle_updates"] == 2
        assert result.metrics["skipped_updates"] == 0
        assert np.isnan(result.metrics["grad_norm"])
        assert np.isnan(result.metrics["fresh_log_ratio/q50"])
        notes[step] = [note for note in result.notes if "changed nothing" in note]
    assert [step for step, said in notes.items() if said] == ([4] if reward == 1 else [4, 8])
    assert f"same reward ({reward:g})" in notes[4][0]


def test_a_mini_batch_without_an_advantage_is_left_out_and_counted():
    trainer = make({0: 0.5, 1: 0.0, 2: 0.0}, questions=3, optimizer={"minibatches": 3})
    result = trainer.step(1)
    assert (trainer.policy.version, result.metrics["idle_updates"], result.notes) == (1, 2, ())
    ((minibatch, _),) = trainer.policy.updates
    assert set(minibatch.batch.question[minibatch.batch.group]) == {0}


@pytest.mark.parametrize("objective", [{"train_on": "hard"}, {"overlong_filter": True}])
def test_an_option_that_leaves_nothing_is_what_a_person_is_told_of(objective, monkeypatch):
    trainer = make(half(60), experience={"ratio": 0.0}, objective=objective)
    monkeypatch.setattr(
        trainer.rollout_worker, "join", lambda produced: cut(RolloutWorker.join(trainer.rollout_worker, produced))
    )
    notes = [note for step in range(1, 5) for note in trainer.step(step).notes]
    (note,) = notes
    options = "objective.train_on or objective.overlong_filter"
    assert f"6 of 6 groups have rewards that differ, and {options} leaves them out" in note


def cut(batch):
    """The same answers, none of which has ended."""
    batch.fill(finished=np.zeros(len(batch), bool))
    return batch
