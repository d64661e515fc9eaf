"""The numbers of training steps, against counts of what the steps show from outside."""

import copy
import dataclasses
import re
from collections import Counter

import numpy as np
import pytest

from exgrpo.train.config.options import ExperienceConfig
from exgrpo.train.metrics.display import COLUMNS
from exgrpo.train.metrics.utilisation import FORWARD, Utilisation
from exgrpo.train.replay import MethodOptions, PlannedGroup, Replay
from tests.train.batches import Row, make_batch, rows_of, trajectories
from tests.train.launch import ROOT
from tests.train.shapes import SMALL
from tests.train.trainers import K, half, make


def test_replays_of_a_trajectory_are_counted():
    trainer, seen = make(half(8)), Counter()
    for step in range(1, 9):
        result = trainer.step(step)
        keys = [(row.question, row.token.tobytes()) for row in rows_of(result.batch) if row.replayed]
        seen.update(keys)
        times = [seen[key] for key in keys]
        assert result.metrics["replayed_times"] == pytest.approx(np.mean(times) if times else np.nan, nan_ok=True)
        assert result.metrics["replayed_times_max"] == pytest.approx(max(times, default=np.nan), nan_ok=True)
    assert max(seen.values()) > 1


def test_replays_are_counted_on_after_a_resume_and_when_the_same_answer_is_written_again():
    def replayed(replay):
        return replay.select([PlannedGroup(0, K - 1, 1)], lambda candidates: None).replays.tolist()

    def written(rewards, step):
        return make_batch([(0, [Row(reward, (i,), step=step) for i, reward in enumerate(rewards)])])

    setting = MethodOptions(ExperienceConfig(start_pass_rate=0.0, trajectory="shortest"), K)
    replay, resumed = (Replay(setting, 2, 0) for _ in range(2))
    replay.store(written([1.0, 0.0, 0.0, 0.0], 1), 1)
    assert [replayed(replay), replayed(replay)] == [[1], [2]]
    replay.store(written([1.0, 0.0, 0.0, 0.0], 2), 2)
    assert [row.step for row in trajectories(replay.memory, 0)] == [2]
    resumed.restore(copy.deepcopy(replay.state()))
    assert replayed(resumed) == replayed(replay) == [3]
    replay.store(written([1.0] * K, 3), 3)
    assert replay.memory.table.column("replays").tolist() == [], "a solved question leaves nothing"


def test_groups_without_an_advantage_or_outside_the_trained_band_are_counted():
    trainer = make({question: 0.5 if question % 2 else 0.0 for question in range(20)}, experience={"ratio": 0.0})
    for step in (1, 2, 3):
        result = trainer.step(step)
        equal = [len(set(rewards)) == 1 for rewards in result.batch.reward.reshape(-1, K)]
        assert result.metrics["idle_group_fraction"] == pytest.approx(np.mean(equal))
    # Half of the fresh answers are right: in (25, 75] and not in (0, 25].
    fractions = [make(half(20), objective={"train_on": band}).step(1).metrics for band in ("medium", "hard")]
    assert [metrics["idle_group_fraction"] for metrics in fractions] == [0, 1]


def test_rewards_are_told_by_data_source():
    trainer = make({question: 1.0 if question < 10 else 0.0 for question in range(20)}, experience={"ratio": 0.0})
    trainer.questions = [
        dataclasses.replace(question, source="easy" if question.index < 10 else "hard")
        for question in trainer.questions
    ]
    metrics = trainer.step(1).metrics
    assert {name: value for name, value in metrics.items() if name.startswith("reward/")} == {
        "reward/easy": 1.0,
        "reward/hard": 0.0,
    }


def test_parts_of_rewards_have_means_over_the_answers_that_have_them():
    trainer, given = make(half(20), experience={"ratio": 0.0}), []
    assert not any("part" in name for name in trainer.step(1).metrics)
    join = trainer.rollout_worker.join

    def join_with_parts(produced):
        batch = join(produced)
        given.extend({"form": float(i), "right": right} if i % 3 else {} for i, right in enumerate(batch.reward))
        batch.fill(parts=given)
        return batch

    trainer.rollout_worker.join = join_with_parts
    metrics = trainer.step(2).metrics
    for name in ("form", "right"):
        expected = np.mean([parts[name] for parts in given if parts])
        assert metrics[f"reward_part/{name}"] == pytest.approx(expected)


def test_the_fraction_of_tokens_with_a_gradient_is_of_fresh_and_replayed_ones(monkeypatch):
    trainer = make(half(20))
    update = trainer.policy.update
    monkeypatch.setattr(
        trainer.policy, "update", lambda *a, **k: dataclasses.replace(update(*a, **k), gradient_tokens=5)
    )
    trainer.step(1)
    trainer.policy.updates.clear()
    metrics = trainer.step(2).metrics
    tokens = sum(minibatch.batch.length.sum() for minibatch, _ in trainer.policy.updates)
    assert metrics["gradient_tokens"] == 10
    assert metrics["gradient_token_fraction"] == pytest.approx(10 / tokens)


def documented() -> set[str]:
    """The names in docs/metrics.md; those with a part that varies end before it."""
    return set(re.findall(r"`([a-zK_0-9/]+)`", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")))


def test_every_number_of_a_step_is_documented():
    trainer = make(half(20), free_log_prob=True)
    trainer.step(1)
    names = {re.sub(r"^(reward|bucket|\w+_log_ratio)/.*", r"\1/", name) for name in trainer.step(2).metrics}
    assert names - {"step"} <= documented()
    assert (
        set(Utilisation(SMALL, 1.0).metrics(dict.fromkeys((*FORWARD, "update"), ()), {"seconds": 1.0})) <= documented()
    )
    assert {key for key, _ in COLUMNS.values()} <= documented()
