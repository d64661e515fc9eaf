"""The fused product by itself: bits, strides and shards. test_triton_fused has its values, by the public functions."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET")):
    pytest.skip("Triton kernels need a GPU, or TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from exgrpo.kernels.chunks.head import Targets
from exgrpo.kernels.chunks.softmax import Sums
from exgrpo.kernels.inputs import VocabShard
from exgrpo.kernels.triton_chunks import fused_product
from exgrpo.kernels.triton_chunks.fused_product import FusedProduct, Operands, fused_sums
from exgrpo.kernels.triton_chunks.launch import Tile

from .support import coarsen, make_case

TILE = Tile(rows=32, columns=32, depth=32, warps=4, stages=2)


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def dtype(request):
    return request.param


def inputs(case):
    return case.hidden.detach(), case.weight.detach(), None if case.bias is None else case.bias.detach(), case.target


def run(hidden, weight, bias, target, *, shard=None, out=None) -> Sums:
    product = FusedProduct(Operands(hidden, weight, bias), None, TILE)
    held = None if shard is None else (target >= 0).unsqueeze(1)
    targets = Targets(target.clamp(min=0).unsqueeze(1), held, torch.arange(len(target), device=target.device))
    return fused_sums(product, targets, None, shard or VocabShard.whole(weight.shape[0]), out)


def test_weights_of_any_strides(device):
    hidden, weight, bias, target = inputs(make_case(20, 32, 50, torch.float16, device, ignored=False))
    expected = run(hidden, weight, bias, target)
    wide = weight.new_full((50, 96), torch.nan)
    wide[:, 16:48] = weight
    scattered = weight.new_full((100, 64), torch.nan)
    scattered[::2, ::2] = weight
    for view in (wide[:, 16:48], scattered[::2, ::2], weight.T.contiguous().T):
        for found, value in zip(run(hidden, view, bias, target), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-5)


def far_case(dtype, device, logit=-200.0):
    """Every fifth token's target is a word that a bias makes impossible, by more than fp32's range or less."""
    hidden, weight, _, target = inputs(make_case(40, 32, 72, dtype, device, ignored=False))
    bias = torch.zeros(72, device=device)
    bias[3] = logit
    target = torch.where(target == 3, 4, target)
    impossible = target.clone()
    impossible[::5] = 3
    return hidden, weight, bias, target, impossible


def test_rows_between_impossible_targets_keep_every_bit(dtype, device):
    """Also those that are done again each time, at other places in a tile."""
    hidden, weight, bias, target, impossible = far_case(dtype, device)
    coarsen(hidden, weight)
    out, usual_out = torch.empty(2, 40, 72, device=device)
    sums = run(hidden, weight, bias, impossible, out=out)
    usual = run(hidden, weight, bias, target, out=usual_out)
    assert (sums.gap[::5] < -100).all()
    others = torch.arange(40, device=device) % 5 != 0
    for found, expected in zip((*sums, out), (*usual, usual_out), strict=True):
        assert torch.equal(found[others], expected[others])


class Waiting(Exception):
    """A rank's part of an operation over all ranks whose result is not known yet."""


class Replayed:
    """A shard's merges with results that are known; the first that is not is raised."""

    def __init__(self, merged):
        self.merged = iter(merged)

    def _next(self, merge, *values):
        for result in self.merged:
            return result
        raise Waiting(merge, values)

    def largest_of(self, *values):
        return self._next(torch.maximum, *values)

    def sum_of(self, *values):
        return self._next(torch.add, *values)


def on_ranks(ranks):
    """What each rank's function of a shard returns, from as many repetitions as there are operations over the ranks."""
    merged = []
    while True:
        found = []
        for rank in ranks:
            try:
                found.append(rank(Replayed(merged)))
            except Waiting as waiting:
                merge, values = waiting.args
                found.append(values)
        if not isinstance(found[0], Sums):
            result = found[0]
            for values in found[1:]:
                result = tuple(map(merge, result, values))
            merged.append(result)
        else:
            return found


def test_shards_agree_with_the_whole(dtype, device):
    """Three ranks, one without a vocabulary; some targets impossible."""
    hidden, weight, bias, _, target = far_case(dtype, device)
    ranks, outs = [], []
    for start, end in ((0, 40), (40, 40), (40, 72)):
        local = torch.where((target >= start) & (target < end), target - start, -1)
        outs.append(torch.full((40, end - start), 7.0, device=device))
        part = (hidden, weight[start:end], bias[start:end], local)
        ranks.append(lambda shard, part=part, out=outs[-1]: run(*part, shard=shard, out=out))
    first, *others = on_ranks(ranks)
    for sums in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(sums, first, strict=True))
    out = torch.empty(40, 72, device=device)
    whole = run(hidden, weight, bias, target, out=out)
    for found, expected in zip((*first, torch.cat(outs, 1)), (*whole, out), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [64, 45])
def test_equal_inputs_give_equal_bits_with_and_without_exponentials(width, dtype, device):
    case = inputs(make_case(40, width, 104, dtype, device, bias=True, ignored=False))
    once, again = torch.empty(2, 40, 104, dtype=dtype, device=device)
    forward_only = run(*case)
    for out in (once, again):
        assert all(torch.equal(a, b) for a, b in zip(run(*case, out=out), forward_only, strict=True))
    assert torch.equal(once, again)


def test_pointers_and_descriptors_agree(monkeypatch, dtype, device):
    """A machine without descriptors has the whole tile's pointers, one with them half of it where strides are odd."""
    case = inputs(make_case(40, 64, 104, dtype, device, bias=True, ignored=False))
    once = run(*case)
    monkeypatch.setattr(
        fused_product, "traits", lambda name: fused_product.Traits(described=False, overlapped=False, parts=1)
    )
    for found, expected in zip(run(*case), once, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
