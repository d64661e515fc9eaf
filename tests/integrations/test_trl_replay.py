"""What a run in TRL needs besides the experience, without TRL."""

import json
from pathlib import Path

import numpy as np
import pytest

from exgrpo.integrations.trl_replay import STATE, load_replay, plan_generation, save_replay
from exgrpo.train.config import ExperienceConfig
from exgrpo.train.experience import Replay
from exgrpo.train.records import Group, Trajectory


def group(question: int, rewards: list[float], *, generation: int = 0) -> Group:
    rows = [
        Trajectory(question, np.array([question, i], np.int32), np.zeros(2, np.float32), True, reward, generation)
        for i, reward in enumerate(rewards)
    ]
    return Group(question, tuple(rows))


def test_a_generation_keeps_its_size_when_few_questions_are_left() -> None:
    replay = Replay(ExperienceConfig(start_pass_rate=0.0), questions=6, samples=2, seed=0)
    replay.take_in([group(question, [1.0, 1.0]) for question in range(4)], 0)
    replay.take_in([group(4, [1.0, 0.0])], 1)
    plan = plan_generation(replay, 4)
    assert plan.replayed.tolist() == [4]
    assert len({*plan.fresh.tolist(), 4}) == 4
    assert 5 in plan.fresh
    assert not replay.finished


def test_a_saved_state_goes_on_with_the_same_draws(tmp_path: Path) -> None:
    replay, other = (Replay(ExperienceConfig(start_pass_rate=0.0), 20, 4, seed) for seed in (0, 1))
    replay.take_in([group(question, [1.0, 0.0, 0.0, 1.0]) for question in range(8)], 0)
    replay.plan(8)
    save_replay(tmp_path, replay, 1)
    assert load_replay(tmp_path, other) == 1
    for _ in range(4):
        expected, found = replay.plan(8), other.plan(8)
        assert found.fresh.tolist() == expected.fresh.tolist()
        assert found.replayed.tolist() == expected.replayed.tolist()


def test_a_saved_state_has_the_names_that_earlier_versions_read(tmp_path: Path) -> None:
    save_replay(tmp_path, Replay(ExperienceConfig(), 20, 4, seed=0), 3)
    names = {"arrays", "open", "generation", "rewards_seen", "pool_position", "pool", "replay"}
    assert set(json.loads((tmp_path / STATE).read_text(encoding="utf-8"))) == names


def test_experience_of_other_questions_is_refused(tmp_path: Path) -> None:
    save_replay(tmp_path, Replay(ExperienceConfig(), 20, 4, seed=0), 0)
    with pytest.raises(ValueError, match="of 20 questions and train_dataset has 21"):
        load_replay(tmp_path, Replay(ExperienceConfig(), 21, 4, seed=0))


def test_ages_are_counted_in_generations_and_go_on_after_a_resume(tmp_path: Path) -> None:
    replay, other = (Replay(ExperienceConfig(start_pass_rate=0.0, max_age=2), 4, 2, seed=0) for _ in range(2))
    replay.take_in([group(0, [1.0, 0.0])], 0)
    replay.take_in([group(1, [0.0, 0.0], generation=1)], 1)
    save_replay(tmp_path, replay, 2)
    generation = load_replay(tmp_path, other)
    for one in (replay, other):
        assert generation == 2
        assert len(one.memory) == 1, "two generations old when the next one is planned"
        one.take_in([group(1, [0.0, 0.0], generation=2)], generation)
        assert len(one.memory) == 0


def test_a_misfit_of_rewards_is_told_once_whatever_is_resumed(tmp_path: Path) -> None:
    replay, resumed = (Replay(ExperienceConfig(start_pass_rate=0.3), 300, 2, 0, success=1.0) for _ in range(2))
    groups = [group(question, [0.9, 0.1]) for question in range(150)]
    pass_rate, note = replay.take_in(groups, 0)
    assert pass_rate == 0
    assert note is not None
    assert "set success to it" in note
    save_replay(tmp_path, replay, 1)
    load_replay(tmp_path, resumed)
    assert resumed.take_in(groups, 1) == replay.take_in(groups, 1) == (0, None)
