"""Group advantages and mean entropies of sequences, by every backend."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exgrpo.kernels import group_advantage, objective, operators, reference, sequence_entropy

from .support import INTERPRETING, assert_as_good, long_interpreted, make_case

pytestmark = pytest.mark.usefixtures("chosen")
EXAMPLES = 15 if INTERPRETING else 100
groups = st.lists(st.tuples(st.floats(-100, 100), st.integers(-3, 3)), max_size=40)


def test_mixed_groups_of_the_paper():
    """Eight responses with one success: 7/8 and -1/8; and a ragged second group in between."""
    reward = torch.tensor([1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0])
    group = torch.tensor([5, 5, 5, 2, 5, 5, 5, 2, 5, 5, 2])
    expected = [7 / 8, -1 / 8, -1 / 8, 1 / 3, -1 / 8, -1 / 8, -1 / 8, 1 / 3, -1 / 8, -1 / 8, -2 / 3]
    advantage = group_advantage(reward, group)
    assert advantage.dtype == torch.float32
    assert advantage.tolist() == pytest.approx(expected)


@settings(max_examples=EXAMPLES)
@given(rows=groups, scale_by_std=st.booleans())
def test_group_advantage(rows, scale_by_std):
    reward = torch.tensor([r for r, _ in rows], dtype=torch.float64)
    group = torch.tensor([g for _, g in rows], dtype=torch.int64)
    advantage = group_advantage(reward, group, scale_by_std=scale_by_std)
    # The scale is at most 1e6 (the epsilon's inverse), and so is the growth of a rounding error of the reward.
    tolerance = 1e-6 if scale_by_std else 1e-11
    torch.testing.assert_close(
        advantage, reference.group_advantage(reward, group, scale_by_std=scale_by_std), rtol=1e-6, atol=tolerance
    )
    for identity in group.unique():
        member = group == identity
        assert abs(advantage[member].sum().item()) <= tolerance
        if member.sum() == 1 or reward[member].unique().numel() == 1:
            assert advantage[member].abs().max().item() <= tolerance


@pytest.mark.parametrize("scale_by_std", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_many_responses(kind, scale_by_std, backend):
    """Two values a group: centred by half their difference, whose sample deviation is sqrt(2) times that."""
    first, second = torch.randint(0, 2, (2, 140))
    reward = torch.cat((first, second)).to(kind)
    group = torch.arange(140, dtype=torch.int32).repeat(2)
    half = (first - second).double() / 2
    expected = torch.cat((half, -half))
    if scale_by_std:
        expected = expected / (expected.abs() * math.sqrt(2) + objective.STD_EPSILON)
    found = operators.group_advantage(reward, group, scale_by_std, backend)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    assert torch.equal(found, operators.group_advantage(reward, group, scale_by_std, backend))


def test_rewards_of_any_strides_and_numbers_of_groups():
    both = torch.tensor([[1.0, 7.0], [3.0, 7.0], [5.0, 9.0]])
    assert group_advantage(both[:, 0], both[:, 1].long()).tolist() == [-1.0, 1.0, 0.0]
    far = torch.tensor([-(2**31), 2**31 - 1, -(2**31)], dtype=torch.int32)
    assert group_advantage(both[:, 0], far).tolist() == [-2.0, 0.0, 2.0]
    assert group_advantage(both[:0, 0], far[:0]).shape == (0,)


def test_a_broken_reward_stays_in_its_group():
    found = group_advantage(torch.tensor([1.0, math.nan, 2.0, 4.0]), torch.tensor([5, 5, 6, 6]), scale_by_std=True)
    assert found.isnan().tolist() == [True, True, False, False]


def test_means_lose_nothing_to_large_values(backend):
    """fp32 would forget the ones beside 2^30; segments without a counted token have 0."""
    values = torch.tensor([2.0**30, 1.0, 1.0, -(2.0**30)]).repeat_interleave(700).repeat(2)
    values[2800:] = math.nan
    counted = values.isfinite()
    bounds = torch.tensor([0, 0, 2800, 5600])
    assert operators.segment_mean(values, counted, bounds, backend).tolist() == [0.0, 0.5, 0.0]


@pytest.mark.parametrize(
    "bounds", [[0, 10, 25, 60], [0, 60], [0, 0, 7, 7, 59, 60, 60], long_interpreted([*range(61)])], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sequence_entropy(bounds, dtype, backend, device):
    case = make_case(60, 24, 101, dtype, device, bias=True, softcap=5.0, temperature=0.7)
    case.target[10:13] = -100
    bounds = torch.tensor(bounds, dtype=torch.int32, device=device)

    def run(case, function, **more):
        return [function(case.hidden, case.weight, case.target, bounds, bias=case.bias, **case.options, **more)]

    ours = run(case, sequence_entropy, backend=backend)
    assert not ours[0].requires_grad
    assert ours[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = run(case.to(torch.float64), reference.sequence_entropy)
    assert_as_good(ours, run(case, reference.sequence_entropy), exact)
    assert not ours[0][bounds.diff() == 0].any()
