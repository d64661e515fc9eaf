"""Mini-batches and steps from which nothing can be learnt."""

import numpy as np
import pytest

from tests.train.fakes import ScriptedGrader
from tests.train.trainers import half, make


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_steps_without_an_advantage_take_no_optimiser_step_and_say_why(reward):
    """Equal rewards are no signal, whatever they are; 0.1 is no binary fraction, so its mean is a rounded one."""
    trainer = make(half(30), rollout={"samples": 7})
    trainer.answerer.grader = ScriptedGrader(lambda text: reward)
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


def test_a_band_that_leaves_nothing_is_what_a_person_is_told_of():
    trainer = make(half(60), experience={"ratio": 0.0}, objective={"train_on": "hard"})
    notes = [note for step in range(1, 5) for note in trainer.step(step).notes]
    (note,) = notes
    assert "6 of 6 groups have rewards that differ, and objective.train_on leaves them out" in note
