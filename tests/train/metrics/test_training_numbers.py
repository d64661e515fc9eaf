"""The numbers of training steps, against numpy and counts of what the steps show from outside."""

import dataclasses
import math
import re
from collections import Counter

import numpy as np
import pytest
import torch

from exgrpo.train.common.records import SHARED, Rollout
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.metrics.display import COLUMNS
from exgrpo.train.metrics.utilisation import FORWARD, FROZEN_BACKWARD, Utilisation, matrix_rate
from exgrpo.train.policy.flops import Reading, together
from exgrpo.train.policy.update import (
    BINS,
    NEAR_ZERO,
    PERCENT,
    RESOLUTION,
    UpdateStats,
    count_log_ratios,
    log_ratio_quantiles,
)
from tests.train.batches import rows_of
from tests.train.fakes import fake_score, one_of_two
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
    idle = dict.fromkeys((*FORWARD, "update"), ())
    assert set(Utilisation(SMALL, 1.0).metrics(idle, {"seconds": 1.0})) <= documented()
    assert {key for key, _ in COLUMNS.values()} <= documented()


NAMES = [f"q{percent:02}" for percent in PERCENT]


def counted(values) -> np.ndarray:
    log_ratio = torch.as_tensor(np.asarray(values))[None]
    return count_log_ratios(log_ratio, torch.tensor([False]), torch.ones_like(log_ratio, dtype=torch.bool))[0].numpy()


@pytest.mark.parametrize("size", [1, 7, 12345])
@pytest.mark.parametrize("spread", [1e-6, 0.05, 4.0])
@pytest.mark.parametrize("law", ["normal", "cauchy", "on-policy or far"])
def test_quantiles_are_numpys_to_the_stated_resolution(law, spread, size):
    rng = np.random.default_rng(size)
    values = spread * (rng.standard_cauchy(size) if law == "cauchy" else rng.normal(size=size))
    if law == "on-policy or far":
        values = np.where(rng.random(size) < 0.6, 0.0, values - 3.0)
    values = values.clip(-20, 20)
    exact = np.quantile(values, np.array(PERCENT) / 100, method="inverted_cdf")
    ours = log_ratio_quantiles(counted(values))
    assert list(ours) == NAMES
    error = np.abs(np.array(list(ours.values())) - exact)
    assert (error <= 1.01 * RESOLUTION / 2 * np.hypot(exact, NEAR_ZERO)).all()
    assert (error[exact == 0] == 0).all()


def test_extremes_count_at_the_ends_and_what_is_no_number_nowhere():
    counts = counted([-math.inf, -100.0, 0.0, 100.0, math.inf, math.nan])
    assert counts.sum() == 5
    assert (counts[0], counts[BINS // 2], counts[-1]) == (2, 1, 2)
    quantiles = log_ratio_quantiles(counts)
    assert quantiles["q01"] == pytest.approx(-20, rel=0.01)
    assert quantiles["q50"] == 0
    assert quantiles["q99"] == pytest.approx(20, rel=0.01)
    assert all(math.isnan(value) for value in log_ratio_quantiles(counted([])).values())


def test_quantiles_of_a_step_are_over_all_its_updates(monkeypatch):
    trainer = make(half(20))
    updates = []

    def update(minibatch, *, clip, term, keep_scores):
        updates.append(0.1 * (len(updates) + 1))
        counts = torch.stack([torch.from_numpy(counted([updates[-1]] * 9)), torch.zeros(BINS, dtype=torch.int64)])
        scores = fake_score(minibatch.batch.token, 0) if keep_scores else None
        return UpdateStats(0.0, 1.0, True, 0.0, 1.0, 1.0, math.nan, math.nan, 0, counts, scores)

    monkeypatch.setattr(trainer.policy, "update", update)
    metrics = trainer.step(1).metrics
    assert [metrics[f"fresh_log_ratio/{name}"] for name in NAMES] == pytest.approx(
        [0.1, 0.1, 0.1, 0.2, 0.2], rel=0.0102
    )
    assert all(math.isnan(metrics[f"replayed_log_ratio/{name}"]) for name in NAMES)
    assert math.isnan(metrics["replayed_weight"])


PHASES = ("select", "generate", "score", "update")


def test_a_prompt_is_needed_once_by_all_its_answers():
    shapes = ((1, 5, 3), (2, 5, 4), (1, 5, 1), (3, 10, 2))
    prompts = [np.full(length, question, np.int32) for question, length, _ in shapes]
    batch = StepBatch.from_answers(prompts, [Rollout(np.zeros(length, np.int32), True) for *_, length in shapes])
    answer = Rollout(np.zeros(3, np.int32), True)
    assert together(batch) == [Reading(5, (3, 1)), Reading(5, (4,)), Reading(10, (2,))]
    assert together(batch, np.array([3, 2])) == [Reading(10, (2,)), Reading(5, (1,))]
    begun = StepBatch.from_answers([np.append(np.zeros(SHARED, np.int32), 1 + i) for i in (0, 0, 1)], [answer] * 3)
    assert together(begun) == [Reading(SHARED + 1, (3, 3)), Reading(SHARED + 1, (3,), SHARED)]


def test_flops_are_those_of_every_token_that_is_read_and_predicted():
    """Token by token: a token goes through the matrices and attends to those before it and half to itself."""
    reading = Reading(5, (3, 1, 4))
    before = [*range(5), *(5 + i for response in (3, 1, 4) for i in range(response - 1))]
    predicted = 1 + 2 + 0 + 3
    attention = sum(4 * SMALL.heads * SMALL.head_width * SMALL.layers * (n + 0.5) for n in before)
    expected = 2 * SMALL.linear * len(before) + attention + 2 * SMALL.vocabulary * SMALL.width * predicted
    assert reading.flops(SMALL) == expected
    assert (reading.written, reading.read) == (8, 7 + 5 + 8)
    of_three = sum(4 * SMALL.heads * SMALL.head_width * SMALL.layers * (n + 0.5) for n in range(3))
    assert Reading(5, (3, 1, 4), 3).flops(SMALL) == expected - 2 * SMALL.linear * 3 - of_three


@pytest.mark.parametrize("passes", [1, 2])
def test_throughput_of_a_step_counts_what_its_phases_are_about(passes):
    trainer = make(half(20), optimizer={"passes": passes})
    trainer.step(1)
    trainer.policy.scored.clear()
    trainer.policy.updates.clear()
    result = trainer.step(2)
    *compared, (scored, _) = trainer.policy.scored
    read = {
        "select": [batch for batch, _ in compared],
        "score": [scored],
        "update": [minibatch.batch for minibatch, _ in trainer.policy.updates],
    }
    tokens = {
        phase: sum(len(row.prompt) + len(row.token) - 1 for batch in batches for row in rows_of(batch))
        for phase, batches in read.items()
    }
    tokens["generate"] = result.batch.length[result.batch.fresh].sum()
    assert all(tokens[phase] for phase in PHASES)
    for phase in PHASES:
        per_second = tokens[phase] / result.metrics[f"seconds/{phase}"]
        assert result.metrics[f"tokens_per_second/{phase}"] == pytest.approx(per_second)
    assert result.work["update"] == [reading for batch in read["update"] for reading in together(batch)]
    assert len(result.work["generate"]) == result.batch.groups


def test_phases_without_work_have_no_throughput_and_no_utilisation():
    result = make(dict.fromkeys(range(20), 1.0)).step(1)  # nothing to replay, nothing to learn
    numbers = result.metrics | Utilisation(SMALL, 1e9).metrics(result.work, result.metrics)
    for phase in PHASES:
        idle = phase in ("select", "update")
        assert math.isnan(numbers[f"tokens_per_second/{phase}"]) == math.isnan(numbers[f"mfu/{phase}"]) == idle


def test_utilisation_is_needed_flops_over_seconds_and_rate():
    work = {"select": (), "generate": [Reading(5, (3, 4))], "score": [Reading(5, (3, 4))], "update": [Reading(5, (3,))]}
    seconds = {"seconds": 10.0, "seconds/select": 0.5, "seconds/generate": 4.0, "seconds/score": 1.0}
    seconds["seconds/update"] = 2.0
    forward, row = (reading.flops(SMALL) for reading in (work["score"][0], work["update"][0]))
    numbers = Utilisation(SMALL, 1e6).metrics(work, seconds)
    assert numbers["matrix_flops_per_second"] == 1e6
    assert numbers["mfu/generate"] == pytest.approx(forward / 4e6)
    assert numbers["mfu/score"] == pytest.approx(forward / 1e6)
    assert numbers["mfu/update"] == pytest.approx(3 * row / 2e6)
    assert numbers["mfu"] == pytest.approx((2 * forward + 3 * row) / 10e6)
    frozen = Utilisation(SMALL, 1e6, backward=FROZEN_BACKWARD).metrics(work, seconds)
    assert frozen["mfu/update"] == pytest.approx(numbers["mfu/update"] * 2 / 3)
    assert frozen["mfu/score"] == numbers["mfu/score"]
    elsewhere = Utilisation(SMALL, 1e6, elsewhere=("generate",))
    assert elsewhere.at_least(9e5) == elsewhere, "the better one of two measurements is kept"
    assert elsewhere.at_least(3e6) == Utilisation(SMALL, 3e6, elsewhere=("generate",))
    elsewhere = elsewhere.metrics(work, seconds)
    assert math.isnan(elsewhere["mfu/generate"])
    assert elsewhere["mfu"] == pytest.approx((forward + 3 * row) / 10e6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_matrix_rate_is_that_of_all_ranks_and_touches_no_random_state(dtype):
    gathered, before = [], torch.get_rng_state()
    rate = matrix_rate(one_of_two(lambda value: gathered.append(value) or value), dtype)
    assert rate == 2 * gathered[-1] > 0
    assert torch.equal(torch.get_rng_state(), before)
