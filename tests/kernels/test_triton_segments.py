"""The kernels over groups of responses and segments of tokens against the plain functions, and against closed forms."""

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET")):
    pytest.skip("Triton kernels need a GPU, or TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from exgrpo.kernels import objective
from exgrpo.kernels.triton_chunks import triton_tokens

from .conftest import DEVICE


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(-2, 3), st.floats(-100, 100)), max_size=30), st.booleans())
def test_groups_of_any_sizes_in_any_order(members, scale_by_std):
    group = torch.tensor([number for number, _ in members], dtype=torch.int64, device=DEVICE)
    reward = torch.tensor([value for _, value in members], dtype=torch.float64, device=DEVICE)
    found = triton_tokens.centre_groups(reward, group, scale_by_std)
    exact = objective.centre_groups(reward, group, scale_by_std)
    # Rewards of a group that are equal but for rounding are divided by the 1e-6 that is added to their deviation.
    bound = 1e-12 * (1e6 if scale_by_std else 1) * (1 + reward.abs().max().item() if members else 1)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=bound)


@pytest.mark.parametrize("scale_by_std", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_more_responses_than_a_tile(kind, scale_by_std, device):
    """Two values a group: centred by half their difference, whose sample deviation is sqrt(2) times that."""
    first, second = torch.randint(0, 2, (2, 140), device=device)
    reward = torch.cat((first, second)).to(kind)
    group = torch.arange(140, device=device, dtype=torch.int32).repeat(2)
    half = (first - second).double() / 2
    expected = torch.cat((half, -half))
    if scale_by_std:
        expected = expected / (expected.abs() * math.sqrt(2) + objective.STD_EPSILON)
    found = triton_tokens.centre_groups(reward, group, scale_by_std)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    assert torch.equal(found, triton_tokens.centre_groups(reward, group, scale_by_std))


def test_no_responses_and_strided_ones(device):
    assert triton_tokens.centre_groups(
        torch.empty(0, device=device), torch.empty(0, dtype=torch.int64, device=device), True
    ).shape == (0,)
    both = torch.tensor([[1.0, 7.0], [3.0, 7.0], [5.0, 9.0]], device=device)
    found = triton_tokens.centre_groups(both[:, 0], both[:, 1].long(), False)
    assert found.tolist() == [-1.0, 1.0, 0.0]


def test_a_broken_reward_stays_in_its_group(device):
    reward = torch.tensor([1.0, math.nan, 2.0, 4.0], device=device)
    found = triton_tokens.centre_groups(reward, torch.tensor([5, 5, 6, 6], device=device), True)
    assert found.isnan().tolist() == [True, True, False, False]


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "offsets", [[0], [0, 0], [0, 7], [0, 3, 3, 4, 700], [0, 1024, 2049, 2500, 2500]], ids=lambda bounds: str(bounds)
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_means_of_segments(offsets, kind, dtype, device):
    values = torch.randn(offsets[-1], dtype=torch.float64).to(dtype).to(device)
    counted = (torch.rand(offsets[-1]) < 0.7).to(device)
    bounds = torch.tensor(offsets, dtype=kind, device=device)
    found = triton_tokens.segment_mean(values.masked_fill(~counted, math.nan), counted, bounds)
    exact = objective.segment_mean(values.double(), counted, bounds)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-15)
    assert torch.equal(found, triton_tokens.segment_mean(values, counted, bounds))


def test_means_lose_nothing_to_large_values(device):
    """fp32 would forget the ones beside 2^30; segments without a counted token have 0."""
    values = torch.tensor([2.0**30, 1.0, 1.0, -(2.0**30)] * 2, device=device)
    counted = torch.tensor([True] * 4 + [False] * 4, device=device)
    assert triton_tokens.segment_mean(values, counted, torch.tensor([0, 4, 8], device=device)).tolist() == [0.5, 0.0]
