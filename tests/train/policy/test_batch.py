"""Advantages, mini-batches, the schedule of micro-batches, their tensors, and numbers of engine and trainer."""

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.kernels import group_advantage
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.config.options import ObjectiveConfig
from exgrpo.train.config.replay import Baseline
from exgrpo.train.policy.batch import IGNORED, MiniBatch, build_minibatches
from exgrpo.train.policy.layout import Padded, schedule
from exgrpo.train.policy.update import mismatch_metrics
from exgrpo.train.replay.groups import fill_advantages, group_advantages
from tests.train.batches import Row, make_batch

CPU = torch.device("cpu")


def row(length: int, reward: float, **more) -> Row:
    return Row(reward, range(10, 10 + length), -np.arange(1.0, length + 1), **more)


def with_advantages(*groups: list[Row], **columns) -> StepBatch:
    rows = sum(map(len, groups))
    batch = make_batch(list(enumerate(groups)), **{"loss_mask": np.ones(rows, bool), **columns})
    batch.fill(ratio_log_prob=batch.old_log_prob)
    fill_advantages(batch, ObjectiveConfig())
    return batch


def whole(batch: StepBatch, objective: ObjectiveConfig) -> MiniBatch:
    (minibatch,) = build_minibatches(batch, 1, np.random.default_rng(0), objective, 50)
    return minibatch


def test_mixed_group_shares_one_mean():
    # m of the 7 fresh ones right: mean (m+1)/8, so (7-m)/8 for the right ones and -(m+1)/8 for the wrong ones.
    for right in range(8):
        fresh = [row(2, float(i < right)) for i in range(7)]
        batch = with_advantages([*fresh, row(2, 1.0, replayed=True)])
        expected = [(7 - right) / 8] * right + [-(right + 1) / 8] * (7 - right) + [(7 - right) / 8]
        np.testing.assert_allclose(batch.advantage, expected, atol=1e-7)


@pytest.mark.parametrize(("normalize", "normalizer"), [("constant", 4 * 50.0), ("token", 14.0), ("sequence", 4.0)])
def test_normalizer_counts_the_whole_minibatch(normalize, normalizer):
    objective = ObjectiveConfig(normalize=normalize, entropy_coef=0.0)
    batch = with_advantages([row(2, 1.0), row(4, 0.0)], [row(3, 1.0), row(5, 1.0, replayed=True)])
    minibatch = whole(batch, objective)
    # The second group's advantages are zero: its rows cannot carry a gradient, yet they count.
    assert minibatch.normalizer == normalizer
    assert (minibatch.tokens, minibatch.fresh_tokens) == (14, 9)
    assert sorted(minibatch.rows) == [0, 1]
    np.testing.assert_array_equal(minibatch.batch.length, batch.length[minibatch.rows])
    share = {2: 0.5, 4: -0.5} if normalize != "sequence" else {2: 0.25, 4: -0.125}
    assert dict(zip(minibatch.batch.length, minibatch.batch.advantage, strict=True)) == share
    np.testing.assert_array_equal(batch.advantage, [0.5, -0.5, 0, 0])


def test_with_an_entropy_bonus_every_row_stays():
    minibatch = whole(with_advantages([row(3, 1.0), row(5, 1.0)]), ObjectiveConfig(entropy_coef=0.1))
    assert len(minibatch.rows) == 2
    assert not minibatch.has_signal


@given(st.integers(1, 9), st.integers(1, 12))
def test_minibatches_partition_the_groups(count, groups):
    batch = with_advantages(*([row(1, 1.0), row(2, 0.0)] for _ in range(groups + 1)))
    batch.fill(trained=np.arange(1, groups + 1)[::-1])
    parts = build_minibatches(batch, count, np.random.default_rng(0), ObjectiveConfig(), 5)
    sizes = [len(part.rows) for part in parts]
    assert len(parts) == min(count, groups)
    assert max(sizes) - min(sizes) <= 2
    for part in parts:
        np.testing.assert_array_equal(part.rows[::2] + 1, part.rows[1::2])
    assert sorted(i for part in parts for i in part.rows) == list(range(2, 2 * groups + 2))


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(100, 400), st.integers(1, 5))
def test_schedule_covers_every_row_once_within_the_budget(lengths, budget, ranks):
    plan = schedule(lengths, budget, ranks)
    assert sorted(i for of_rank in plan for batch in of_rank for i in batch) == list(range(len(lengths)))
    assert len(plan) == ranks
    assert len({len(of_rank) for of_rank in plan}) == 1
    for of_rank in plan:
        for batch in of_rank:
            assert len(batch) * max((lengths[i] for i in batch), default=0) <= budget
    loads = [sum(lengths[i] for batch in of_rank for i in batch) for of_rank in plan]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_factors_of_the_step_multiply_the_advantages_of_fresh_tokens():
    batch = with_advantages([row(2, 1.0), row(3, 0.0), row(1, 1.0, replayed=True)])
    minibatch = whole(batch, ObjectiveConfig())
    assert not minibatch.batch.has("factor")
    batch.put(np.array([0, 1]), log_prob=np.arange(5.0), factor=np.array([1, 2, 0, 1, 0.5]))
    minibatch.refer_to(batch)
    np.testing.assert_array_equal(minibatch.batch.ratio_log_prob, [0, 1, 2, 3, 4, -1])
    np.testing.assert_allclose(minibatch.batch.advantage, [1 / 3, -2 / 3, 1 / 3], atol=1e-7)
    tensors = Padded().rows(minibatch.batch, CPU)
    expected = np.array([1, 2, 0, 1, 0.5, 1]) * np.repeat(minibatch.batch.advantage, [2, 3, 1])
    torch.testing.assert_close(tensors.advantage[tensors.target != IGNORED], torch.from_numpy(expected).float())
    assert tensors.active == 5


def test_rows_that_are_not_learnt_count_and_carry_no_gradient():
    objective = ObjectiveConfig(normalize="token", entropy_coef=0.1)
    batch = with_advantages(*([row(2, 1.0), row(4, 0.0)] for _ in range(2)), loss_mask=[False, False, True, True])
    minibatch = whole(batch, objective)
    assert (minibatch.normalizer, minibatch.tokens) == (12, 12)
    assert minibatch.rows.tolist() == [2, 3]


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


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-2, 2, width=32)), min_size=1, max_size=12), st.booleans())
def test_advantages_are_those_of_the_kernel_to_the_bit(rows, scale_by_std):
    group, reward = (np.array(column) for column in zip(*rows, strict=True))
    options = ObjectiveConfig(scale_by_std=scale_by_std)
    found = group_advantages(reward, group, np.ones(len(rows)), options, np.float32)
    reward32, groups = torch.from_numpy(reward.astype(np.float32)), torch.from_numpy(group)
    np.testing.assert_array_equal(found, group_advantage(reward32, groups, scale_by_std=scale_by_std).numpy())


@given(st.lists(st.integers(0, 1), min_size=2, max_size=8), st.sampled_from(get_args(Baseline)), st.booleans())
def test_answers_of_weight_n_count_as_n_answers(rewards, baseline, scale_by_std):
    """An answer without weight has the advantage that it would have had in their place."""
    options = ObjectiveConfig(baseline=baseline, scale_by_std=scale_by_std and baseline != "log_mean_exp")
    whole = group_advantages(np.array(rewards, float), np.zeros(len(rewards), int), np.ones(len(rewards)), options)
    right = sum(rewards)
    reward, weight = np.array([1.0, 0.0, *rewards]), np.array([right, len(rewards) - right, *np.zeros(len(rewards))])
    found = group_advantages(reward, np.zeros(len(reward), int), weight, options)[2:]
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-12)
