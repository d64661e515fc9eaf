"""Rows, mini-batches, the schedule of micro-batches and their tensors."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.config import ObjectiveConfig
from exgrpo.train.policy.batch import (
    IGNORED,
    TrainingRow,
    advantages,
    build_minibatches,
    build_rows,
)
from exgrpo.train.policy.layout import pad_rows, pad_tokens, schedule
from exgrpo.train.records import Group, Score, Trajectory


def trajectory(length: int, reward: float, first: int = 10) -> Trajectory:
    ids = np.arange(first, first + length, dtype=np.int32)
    return Trajectory(0, ids, -np.arange(1, length + 1, dtype=np.float32), True, reward, 1)


def prompt(question: int) -> np.ndarray:
    return np.array([1, 2, 3], np.int32)


def with_advantages(groups: list[Group], **options) -> list[list[TrainingRow]]:
    return build_rows(groups, advantages(groups), prompt, **options)


def test_mixed_group_shares_one_mean():
    # m of the 7 fresh ones right: mean (m+1)/8, so (7-m)/8 for the right ones and -(m+1)/8 for the wrong ones.
    for right in range(8):
        fresh = tuple(trajectory(2, float(i < right)) for i in range(7))
        ((*rows, last),) = with_advantages([Group(0, fresh, (trajectory(2, 1.0),))])
        expected = [(7 - right) / 8] * right + [-(right + 1) / 8] * (7 - right)
        np.testing.assert_allclose([row.advantage for row in rows], expected, atol=1e-7)
        assert last.replayed
        assert last.advantage == pytest.approx((7 - right) / 8)
        assert not any(row.replayed for row in rows)


@pytest.mark.parametrize(("normalize", "normalizer"), [("constant", 4 * 50.0), ("token", 14.0), ("sequence", 4.0)])
def test_normalizer_counts_the_whole_minibatch(normalize, normalizer):
    objective = ObjectiveConfig(normalize=normalize, entropy_coef=0.0)
    groups = [
        Group(0, (trajectory(2, 1.0), trajectory(4, 0.0))),
        Group(1, (trajectory(3, 1.0), trajectory(5, 1.0))),
    ]
    (minibatch,) = build_minibatches(with_advantages(groups), 1, np.random.default_rng(0), objective, 50)
    # The second group's advantages are zero: its rows cannot carry a gradient, yet they count.
    assert minibatch.normalizer == normalizer
    assert minibatch.tokens == 14
    assert sorted(len(row.response) for row in minibatch.rows) == [2, 4]
    share = {2: 0.5, 4: -0.5} if normalize != "sequence" else {2: 0.25, 4: -0.125}
    assert {len(row.response): row.advantage for row in minibatch.rows} == share


def test_with_an_entropy_bonus_every_row_stays():
    groups = [Group(0, (trajectory(3, 1.0), trajectory(5, 1.0)))]
    (minibatch,) = build_minibatches(
        with_advantages(groups), 1, np.random.default_rng(0), ObjectiveConfig(entropy_coef=0.1), 50
    )
    assert len(minibatch.rows) == 2


@given(st.integers(1, 9), st.integers(1, 12))
def test_minibatches_partition_the_groups(count, groups):
    rows = [[TrainingRow(prompt(0), np.array([i], np.int32), np.zeros(1, np.float32), 1.0)] for i in range(groups)]
    parts = build_minibatches(rows, count, np.random.default_rng(0), ObjectiveConfig(), 5)
    sizes = [len(part.rows) for part in parts]
    assert len(parts) == min(count, groups)
    assert max(sizes) - min(sizes) <= 1
    assert sorted(int(row.response[0]) for part in parts for row in part.rows) == list(range(groups))


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


def test_collated_targets_sit_one_position_before_their_token():
    rows = [
        TrainingRow(np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32), np.array([-1, -2], np.float32), 0.5),
        TrainingRow(np.array([6], np.int32), np.array([7, 8, 9, 10], np.int32), np.full(4, -3, np.float32), -1.0, True),
    ]
    batch = pad_rows(rows, torch.device("cpu"))
    assert batch.tokens.tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]
    assert batch.target.tolist() == [[IGNORED, IGNORED, 4, 5], [7, 8, 9, 10]]
    assert batch.old_log_prob.tolist() == [[0, 0, -1, -2], [-3, -3, -3, -3]]
    assert batch.advantage.tolist() == [0.5, -1.0]
    assert batch.replayed.tolist() == [False, True]


def test_an_empty_microbatch_has_no_target():
    batch = pad_rows([], torch.device("cpu"))
    assert batch.tokens.shape == (1, 2)
    assert (batch.target == IGNORED).all()


def test_log_probs_of_the_engine_make_weights_by_token_and_leave_the_advantage():
    fresh = tuple(dataclasses.replace(trajectory(n, float(n == 2), first=5 * n), behaviour="engine") for n in (2, 3))
    own = tuple(t.log_prob + np.linspace(-1, 1, len(t.log_prob), dtype=np.float32) for t in fresh)
    past = dataclasses.replace(trajectory(1, 1.0), behaviour="engine")
    group = Group(0, fresh, (past,), scores=tuple(Score(of_own, np.zeros_like(of_own)) for of_own in own))
    as_trainers = tuple(dataclasses.replace(t, behaviour="trainer") for t in fresh)
    (plain,) = with_advantages([Group(0, as_trainers, (past,))])
    (rows,) = with_advantages([group], mismatch_cap=2.0)
    assert [row.advantage for row in rows] == [row.advantage for row in plain]
    for row, of_own in zip(rows, own, strict=False):
        np.testing.assert_array_equal(row.old_log_prob, of_own)
    np.testing.assert_array_equal(rows[2].old_log_prob, past.log_prob)
    batch = pad_rows(rows, torch.device("cpu"))
    expected = torch.zeros(3, 5)
    for i, factors in enumerate([[np.exp(-1), 2.0], [np.exp(-1), 1.0, 2.0], [1.0]]):
        expected[i, 2 : 2 + len(factors)] = torch.tensor(factors) * rows[i].advantage
    real = batch.target != IGNORED
    torch.testing.assert_close(batch.advantage[real], expected[real].float())
    assert pad_rows(plain, torch.device("cpu")).advantage.shape == (3,)


def test_masked_rows_count_and_carry_no_gradient():
    groups = [Group(q, (trajectory(2, 1.0), trajectory(4, 0.0))) for q in range(2)]
    objective = ObjectiveConfig(normalize="token", entropy_coef=0.1)
    rows = with_advantages(groups, trained=lambda group: group.question == 1)
    (minibatch,) = build_minibatches(rows, 1, np.random.default_rng(0), objective, 50)
    assert (minibatch.normalizer, minibatch.tokens) == (12, 12)
    assert list(minibatch.rows) == rows[1]


def test_tokens_are_padded_alike_with_and_without_a_loss():
    rows = [TrainingRow(prompt(0)[:n], np.arange(n, 9, dtype=np.int32), np.zeros(9 - n, np.float32)) for n in (1, 3)]
    plain, whole = pad_tokens(rows, torch.device("cpu")), pad_rows(rows, torch.device("cpu"))
    assert torch.equal(plain.tokens, whole.tokens)
    assert torch.equal(plain.target, whole.target)
    assert [row.predicting for row in rows] == [slice(0, 8), slice(2, 8)]
