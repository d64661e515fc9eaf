"""What an ExGRPO run in TRL remembers, without TRL."""

from pathlib import Path

import numpy as np
import pytest

from exgrpo.integrations.trl_replay import Replay
from exgrpo.train.config import ExperienceConfig
from exgrpo.train.records import Group, Trajectory


def group(question: int, rewards: list[float], *, generation: int = 0) -> Group:
    rows = [
        Trajectory(question, np.array([question, i], np.int32), np.zeros(2, np.float32), True, reward, generation)
        for i, reward in enumerate(rewards)
    ]
    return Group(question, tuple(rows))


def test_a_generation_keeps_its_size_when_few_questions_are_left() -> None:
    replay = Replay(ExperienceConfig(start_pass_rate=0.0), questions=6, samples=2, seed=0)
    replay.take_in([group(question, [1.0, 1.0]) for question in range(4)])
    replay.take_in([group(4, [1.0, 0.0])])
    plan = replay.plan(4)
    assert plan.replayed.tolist() == [4]
    assert len({*plan.fresh.tolist(), 4}) == 4
    assert 5 in plan.fresh
    assert not replay.finished


def test_replay_starts_after_the_step_that_passes_the_threshold() -> None:
    replay = Replay(ExperienceConfig(start_pass_rate=0.35), questions=6, samples=2, seed=0)
    assert replay.take_in([group(0, [1.0, 0.0])]) == (0.5, None)
    assert replay.on
    assert len(replay.memory) == 0  # what was written before is not kept
    replay.take_in([group(0, [1.0, 0.0])])
    assert len(replay.memory) == 1


def test_a_saved_state_goes_on_with_the_same_draws(tmp_path: Path) -> None:
    replay, other = (Replay(ExperienceConfig(start_pass_rate=0.0), 20, 4, seed) for seed in (0, 1))
    replay.take_in([group(question, [1.0, 0.0, 0.0, 1.0]) for question in range(8)])
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


def test_ages_are_counted_in_generations_and_go_on_after_a_resume(tmp_path: Path) -> None:
    replay, other = (Replay(ExperienceConfig(start_pass_rate=0.0, max_age=2), 4, 2, seed=0) for _ in range(2))
    replay.take_in([group(0, [1.0, 0.0])])
    replay.take_in([group(1, [0.0, 0.0], generation=1)])
    replay.save(tmp_path)
    other.load(tmp_path)
    for one in (replay, other):
        assert one.generation == 2
        assert len(one.memory) == 1, "two generations old when the next one is planned"
        one.take_in([group(1, [0.0, 0.0], generation=2)])
        assert len(one.memory) == 0


def test_a_success_is_what_the_setting_says_and_a_misfit_is_told_once(tmp_path: Path) -> None:
    strict, fitting = (Replay(ExperienceConfig(start_pass_rate=0.3), 300, 2, 0, success=s) for s in (1.0, 0.9))
    groups = [group(question, [0.9, 0.1]) for question in range(150)]
    assert fitting.take_in(groups) == (0.5, None)
    assert fitting.on
    fitting.take_in([group(0, [0.9, 0.1]), group(1, [0.9, 0.9])])
    assert len(fitting.memory) == 1
    assert fitting.memory.retired.tolist() == [False, True] + [False] * 298
    pass_rate, note = strict.take_in(groups)
    assert pass_rate == 0
    assert note is not None
    assert "set success to it" in note
    strict.save(tmp_path)
    resumed = Replay(ExperienceConfig(start_pass_rate=0.3), 300, 2, 0, success=1.0)
    resumed.load(tmp_path)
    assert resumed.take_in(groups) == strict.take_in(groups) == (0, None)
