"""The statistics kernel by itself, writing exp(d) beside the logits: through the backend only GPUs take that path.

It belongs to bf16 products with fp32 results, and CPUs have none.
"""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET")):
    pytest.skip("Triton kernels need a GPU, or TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from exgrpo.kernels.triton_chunks.row_kernels import listed_largest_kernel, statistics_kernel

BLOCK = 128
ROUNDINGS = {torch.float32: 16 * 2.0**-23, torch.bfloat16: 2.0**-7}  # the interpreter cuts bf16 off: a whole ulp


def run(logits, target, out, *, given, listed=None):
    """Anchors, gaps, S and M of the rows of a view."""
    rows, vocabulary = logits.shape
    anchor, gap, rest, moment = logits.new_empty(4, rows)
    statistics_kernel[(rows,)](
        logits,
        logits,
        out,
        target,
        logits.new_ones(rows),
        given,
        anchor if listed is None else listed,
        anchor,
        gap,
        rest,
        moment,
        logits.new_ones(1),
        vocabulary,
        logits.stride(0),
        HAS_BIAS=False,
        HAS_SOFTCAP=False,
        GIVEN=True,
        LISTED=listed is not None,
        WRITE=True,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return anchor, gap, rest, moment


def assert_close(found, exact, roundings=ROUNDINGS[torch.float32]):
    """Up to roundings of each value, and what is lost below 1e-30 with the smallest numbers of fp32."""
    assert found.isfinite().all()
    error = (found.double() - exact).abs()
    assert (error <= roundings * exact.abs() + 1e-30).all(), error.max()


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request):
    return request.param


def make_rows(device, vocabulary, *, rows=6, stride=None):
    """Rows of a wider matrix, NaN beyond the vocabulary; the targets are likely words."""
    stride = stride or vocabulary
    matrix = torch.full((rows, stride), torch.nan)
    matrix[:, :vocabulary] = 2 * torch.randn(rows, vocabulary)
    target = torch.randint(0, vocabulary, (rows,))
    matrix[torch.arange(rows), target] = 5.0 + torch.rand(rows)
    return matrix.to(device)[:, :vocabulary], target.to(device)


def test_given_anchors_stay_and_nothing_beyond_the_vocabulary_is_touched(dtype, device):
    """Another shard holds some of the targets: nothing is taken out of their sums, and their gap is -inf."""
    logits, target = make_rows(device, 300, rows=4, stride=336)
    target[::2] = -1
    given, storage, before = logits.amax(1) + 0.5, torch.full((4, 336), 7.0, dtype=dtype, device=device), logits.clone()
    anchor, gap, rest, moment = run(logits, target, storage, given=given)
    d = logits.double() - given.double().unsqueeze(1)
    e = d.exp()
    e[1::2].scatter_(1, target[1::2].unsqueeze(1), 0.0)
    # z is rounded before d is formed, and exp turns an absolute error of d into a relative one of e.
    roundings = (16 + 4 * logits.abs().max().item()) * 2.0**-23
    assert torch.equal(anchor, given)
    assert (gap[::2] == -torch.inf).all()
    assert_close(gap[1::2], d[1::2].gather(1, target[1::2].unsqueeze(1)).squeeze(1), roundings)
    assert_close(rest, e.sum(1), roundings)
    assert_close(moment, (e * d).sum(1), roundings * (1 + logits.abs().max().item()))
    assert_close(storage[:, :300], e, roundings + ROUNDINGS[dtype])
    assert (storage[:, 300:] == 7).all()
    assert torch.equal(logits, before)


def test_rows_that_are_not_listed_stay_as_they_are(dtype, device):
    logits, target = make_rows(device, 300)
    given, listed = logits.amax(1), torch.tensor([True, False, False, True, False, True], device=device)
    whole, some = torch.full((2, 6, 300), 7.0, dtype=dtype, device=device)
    everything = run(logits, target, whole, given=given)
    _, _, rest, moment = run(logits, target, some, given=given, listed=listed)
    assert torch.equal(rest, torch.where(listed, everything[2], 0.0))
    assert torch.equal(moment, torch.where(listed, everything[3], 0.0))
    assert torch.equal(some, torch.where(listed.unsqueeze(1), whole, 7.0))


@pytest.mark.parametrize("vocabulary", [1, 128, 300])
def test_largest_logits_of_listed_rows(vocabulary, device):
    logits, _ = make_rows(device, vocabulary, stride=336)
    bias, listed = torch.randn(vocabulary, device=device), torch.arange(6, device=device) % 2 == 0
    largest, cap = torch.full((6,), 7.0, device=device), torch.full((1,), 3.0, device=device)
    switches = {"HAS_BIAS": True, "HAS_SOFTCAP": True, "BLOCK": BLOCK, "num_warps": 4}
    listed_largest_kernel[(6,)](logits, bias, listed, largest, cap, vocabulary, logits.stride(0), **switches)
    exact = 3 * torch.tanh((logits.double() + bias).amax(1) / 3)
    assert (largest[~listed] == -torch.inf).all()
    assert_close(largest[listed], exact[listed])
