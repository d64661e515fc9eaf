"""Quantiles of log-ratios against numpy, and their independence of packing and ranks."""

import math

import numpy as np
import pytest
import torch

from exgrpo.train.policy.update import (
    BINS,
    NEAR_ZERO,
    PERCENT,
    RESOLUTION,
    UpdateStats,
    count_log_ratios,
    log_ratio_quantiles,
)
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
