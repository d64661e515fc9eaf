"""Quantiles of log-ratios against numpy, and their independence of packing and ranks."""

import math

import numpy as np
import pytest
import torch

from exgrpo.kernels import PolicyLoss
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.policy.layout import Padded, schedule
from exgrpo.train.policy.loss import LossTerms
from exgrpo.train.policy.update import (
    BINS,
    NEAR_ZERO,
    PERCENT,
    RESOLUTION,
    Tally,
    UpdateStats,
    count_log_ratios,
    log_ratio_quantiles,
)
from tests.train.batches import Row, make_batch
from tests.train.fakes import fake_score
from tests.train.trainers import half, make

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


class GatheringWorld:
    """Ranks that report one after the other: the last one has gathered what all of them hold."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held = []

    def gather(self, value):
        self.held.append(value)
        return self.held


def rows(count: int) -> StepBatch:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, count)
    groups = [
        (1, [Row(response=rng.integers(3, 9, n), log_prob=rng.normal(-1, 1, n), replayed=i % 3 == 0)])
        for i, n in enumerate(lengths)
    ]
    batch = make_batch(groups, advantage=np.ones(count))
    batch.fill(ratio_log_prob=batch.old_log_prob)
    return batch


def stats(batch: StepBatch, *, budget: int, ranks: int, beta: float | None) -> UpdateStats:
    """Of an update after which the log-prob of every token is -0.9."""
    world = GatheringWorld(ranks)
    for share in schedule((batch.length + 1).tolist(), budget, ranks):
        tally = Tally(LossTerms(MethodOptions(), 1.0, term="shaped" if beta else "ratio"))
        for numbers in share:
            micro = Padded().rows(batch.take(np.array(numbers, np.int64)), torch.device("cpu"))
            log_prob = torch.where(micro.target >= 0, -0.9, 0.0)
            ratio = torch.where(micro.target >= 0, (log_prob - micro.old_log_prob).exp(), 0.0)
            nothing = torch.zeros_like(ratio)
            tally.add(micro, PolicyLoss(torch.zeros(()), log_prob, nothing, ratio, nothing))
        result = tally.stats(world, grad_norm=1.0, applied=True)
    return result


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("budget", [40, 128, 10**6])
def test_counts_depend_neither_on_packing_nor_on_ranks(budget, ranks):
    batch = rows(40)
    ours = stats(batch, budget=budget, ranks=ranks, beta=0.1)
    assert torch.equal(ours.log_ratios, stats(batch, budget=32, ranks=1, beta=0.1).log_ratios)
    for replayed in (False, True):
        part = batch.take(batch.replayed == replayed)
        log_ratios = -0.9 - part.old_log_prob.astype("d")
        assert int(ours.log_ratios[int(replayed)].sum()) == len(log_ratios)
        exact = np.quantile(log_ratios, np.array(PERCENT) / 100, method="inverted_cdf")
        quantiles = list(log_ratio_quantiles(ours.log_ratios[int(replayed)].numpy()).values())
        np.testing.assert_allclose(quantiles, exact, rtol=0.0102, atol=1.1e-5)
    ratio = np.exp(log_ratios)
    assert ours.replayed_weight == pytest.approx((ratio / (ratio + 0.1)).mean(), rel=1e-5)
    plain = stats(batch, budget=budget, ranks=ranks, beta=None)
    assert plain.replayed_weight == plain.replayed_ratio == pytest.approx(ratio.mean(), rel=1e-5)


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
