"""Truncated weights and the numbers that describe a mismatch, against closed forms and exact sums."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from exgrpo.train.policy.mismatch import mismatch_metrics, truncated_weight

log_probs = arrays(np.float32, st.shared(st.integers(1, 30)), elements=st.floats(-20, 0, width=32))


@given(log_probs, log_probs, st.floats(0.1, 10))
def test_weights_are_the_ratio_up_to_the_cap(trainer, engine, cap):
    weight = truncated_weight(trainer, engine, cap)
    assert weight.dtype == np.float32
    expected = np.minimum(np.exp(trainer.astype(np.float64) - engine), cap)
    # Rounding the difference of numbers below 20 in fp32 moves it by 2^-20, and so its exponential relatively.
    np.testing.assert_allclose(weight, expected, rtol=4e-6)


def test_no_cap_is_plain_importance_sampling():
    trainer, engine = np.log(np.array([0.9, 0.1], np.float32)), np.log(np.array([0.1, 0.9], np.float32))
    np.testing.assert_allclose(truncated_weight(trainer, engine, math.inf), [9, 1 / 9], rtol=1e-6)


def test_numbers_of_a_known_difference():
    trainer = np.array([-1.0, -2.0, -0.5], np.float32)
    engine = np.array([-1.0, -1.5, -1.5], np.float32)
    numbers = mismatch_metrics(trainer, engine)
    w = np.exp([0, -0.5, 1.0])
    assert numbers["mean"] == pytest.approx(0.5)
    assert numbers["p99"] == numbers["max"] == 1.0
    assert numbers["kl"] == pytest.approx(-0.5 / 3)
    assert numbers["kl_k3"] == pytest.approx((w - 1 - np.array([0, -0.5, 1.0])).mean())
    assert numbers["ess"] == pytest.approx(w.sum() ** 2 / (3 * (w**2).sum()))


@given(log_probs, log_probs)
def test_bounds(trainer, engine):
    numbers = mismatch_metrics(trainer, engine)
    assert 0 <= numbers["mean"] <= numbers["max"]
    assert numbers["p99"] <= numbers["max"]
    assert numbers["kl_k3"] >= -1e-9
    assert 1 / len(trainer) - 1e-9 <= numbers["ess"] <= 1 + 1e-9
    same = mismatch_metrics(trainer, trainer)
    assert same == {"mean": 0, "p99": 0, "max": 0, "kl": 0, "kl_k3": 0, "ess": pytest.approx(1)}


def test_both_estimates_are_of_the_divergence_from_the_engine_to_the_trainer():
    mu, pi = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    tokens = np.random.default_rng(0).choice(3, 200_000, p=mu)
    numbers = mismatch_metrics(np.log(pi[tokens]).astype(np.float32), np.log(mu[tokens]).astype(np.float32))
    exact = float((mu * np.log(mu / pi)).sum())
    d = np.log(pi / mu)
    for name, terms in (("kl", -d), ("kl_k3", np.expm1(d) - d)):
        deviation = math.sqrt(float((mu * (terms - exact) ** 2).sum()) / len(tokens))
        assert abs(numbers[name] - exact) < 4 * deviation
    assert numbers["ess"] == pytest.approx(1 / float((mu * (pi / mu) ** 2).sum()), rel=0.01)
