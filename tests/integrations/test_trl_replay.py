"""What an ExGRPO run in TRL remembers, without TRL."""

from pathlib import Path

import numpy as np
import pytest

from exgrpo.integrations.trl_replay import Replay
from exgrpo.train.config import ExperienceConfig
from exgrpo.train.records import Group, Trajectory


def group(question: int, rewards: list[float]) -> Group:
    rows = [
        Trajectory(question, np.array([question, i], np.int32), np.zeros(2, np.float32), True, reward, step=1)
        for i, reward in enumerate(rewards)
    ]
    return Group(question, tuple(rows))


def test_a_generation_keeps_its_size_when_few_questions_are_left() -> None:
    replay = Replay(ExperienceConfig(start_pass_rate=0.0), questions=6, samples=2, seed=0)
    replay.take_in([group(question, [1.0, 1.0]) for question in range(4)], step=1)
    replay.take_in([group(4, [1.0, 0.0])], step=2)
    plan = replay.plan(4)
    assert plan.replayed.tolist() == [4]
    assert len({*plan.fresh.tolist(), 4}) == 4
    assert 5 in plan.fresh
    assert not replay.finished


def test_replay_starts_after_the_step_that_passes_the_threshold() -> None:
    replay = Replay(ExperienceConfig(start_pass_rate=0.35), questions=6, samples=2, seed=0)
    assert replay.take_in([group(0, [1.0, 0.0])], step=1) == 0.5
    assert replay.on
    assert len(replay.memory) == 0  # what was written before is not kept
    replay.take_in([group(0, [1.0, 0.0])], step=2)
    assert len(replay.memory) == 1


def test_a_saved_state_goes_on_with_the_same_draws(tmp_path: Path) -> None:
    replay, other = (Replay(ExperienceConfig(start_pass_rate=0.0), 20, 4, seed) for seed in (0, 1))
    replay.take_in([group(question, [1.0, 0.0, 0.0, 1.0]) for question in range(8)], step=1)
    replay.plan(8)
    replay.save(tmp_path)
    other.load(tmp_path)
    for _ in range(4):
        expected, found = replay.plan(8), other.plan(8)
        assert found.fresh.tolist() == expected.fresh.tolist()
        assert found.replayed.tolist() == expected.replayed.tolist()


def test_experience_of_other_questions_is_refused(tmp_path: Path) -> None:
    Replay(ExperienceConfig(), 20, 4, seed=0).save(tmp_path)
    with pytest.raises(ValueError, match="of 20 questions and train_dataset has 21"):
        Replay(ExperienceConfig(), 21, 4, seed=0).load(tmp_path)
