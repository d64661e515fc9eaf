"""The fused product by itself, against the same in float64 on the same rounded operands."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET")):
    pytest.skip("Triton kernels need a GPU, or TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from exgrpo.kernels.chunks.head import Targets
from exgrpo.kernels.chunks.softmax import Sums
from exgrpo.kernels.triton_chunks import fused_product
from exgrpo.kernels.triton_chunks.fused_product import FusedProduct, Operands, fused_sums
from exgrpo.kernels.triton_chunks.launch import Tile
from exgrpo.kernels.vocab_parallel import VocabShard

from .support import coarsen, fewer_interpreted, long_interpreted, make_case

TILE = Tile(rows=32, columns=32, depth=32, warps=4, stages=2)
ROUNDINGS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}  # the interpreter cuts bf16 off


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def dtype(request):
    return request.param


def inputs(case):
    return case.hidden.detach(), case.weight.detach(), None if case.bias is None else case.bias.detach(), case.target


def run(hidden, weight, bias, target, *, temperature=None, softcap=None, shard=None, tile=TILE, out=None) -> Sums:
    product = FusedProduct(Operands(hidden, weight, bias), softcap, tile)
    held = None if shard is None else (target >= 0).unsqueeze(1)
    targets = Targets(target.clamp(min=0).unsqueeze(1), held, torch.arange(len(target), device=target.device))
    return fused_sums(product, targets, temperature, shard or VocabShard.whole(weight.shape[0]), out)


def oracle(anchor, hidden, weight, bias, target, *, temperature=None, softcap=None):
    """Gap, S, M and E (times the cap's slope) in float64 from given anchors, and z [n, V]."""
    z = hidden.double() @ weight.double().T
    if bias is not None:
        z = z + bias.double()
    slope = torch.ones_like(z)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
        slope = 1 - (z / softcap) ** 2
    tau = torch.ones(len(z), 1, device=z.device).double() if temperature is None else temperature.double().unsqueeze(1)
    d = (z - anchor.double().unsqueeze(1)) / tau
    held, index = (target >= 0).unsqueeze(1), target.clamp(min=0).unsqueeze(1)
    gap = torch.where(held, d.gather(1, index), -torch.inf).squeeze(1)
    e = d.exp()
    e = e.scatter(1, index, torch.where(held, 0.0, e.gather(1, index)))
    return (gap, e.sum(1), torch.where(e > 0, e * d, 0.0).sum(1)), e * slope, z


def magnitude(hidden, weight, bias, temperature=None):
    """A bound [n] of all partial sums of a row's logits, over tau: their rounding errors are in proportion to it."""
    size = (hidden.double().abs() @ weight.double().abs().T).amax(1)
    if bias is not None:
        size = size + bias[bias.isfinite()].double().abs().max()
    return size if temperature is None else size / temperature.double()


def check(hidden, weight, bias, target, *, out_dtype=torch.float32, tile=TILE, shard=None, **options) -> Sums:
    """Compares everything with the oracle."""
    rows, vocabulary = target.numel(), weight.shape[0]
    stride = -(-vocabulary // 8) * 8 + 8
    storage = torch.full((rows, stride), 7.0, dtype=out_dtype, device=hidden.device)
    sums = run(hidden, weight, bias, target, tile=tile, shard=shard, out=storage[:, :vocabulary], **options)
    compare(sums, storage[:, :vocabulary], hidden, weight, bias, target, **options)
    whole = 16 // storage.itemsize  # tensor copies write 16 bytes as a whole
    assert (storage[:, -(-vocabulary // whole) * whole :] == 7).all()
    return sums


def compare(sums, written, hidden, weight, bias, target, **options):
    (gap, rest, moment), e, _ = oracle(sums.anchor, hidden, weight, bias, target, **options)
    # exp turns an absolute error of d into a relative one of e; half of the digits of a sum of D terms are by chance.
    size = magnitude(hidden, weight, bias, options.get("temperature"))
    roundings = (16 + 4 * size) * 2.0**-23
    kept = gap.isfinite()
    assert (sums.gap[~kept] == -torch.inf).all()
    assert ((sums.gap - gap).abs() <= roundings)[kept].all()
    assert ((sums.rest - rest).abs() <= roundings * rest + 1e-30).all()
    # Terms of both signs: the error is that of the largest, not of the sum.
    assert ((sums.moment - moment).abs() <= roundings * (1 + size) * rest + 1e-30).all()
    error = (written.double() - e).abs()
    least = torch.finfo(written.dtype).smallest_normal if written.dtype == torch.float16 else 1e-30
    slope_error = 0.0 if options.get("softcap") is None else roundings.unsqueeze(1) * e.abs().amax(1, keepdim=True)
    assert (error <= (roundings.unsqueeze(1) + ROUNDINGS[written.dtype]) * e.abs() + slope_error + least).all()


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "temperature": True}], ids=str)
@pytest.mark.parametrize(("tokens", "width", "vocabulary"), [(40, 64, 104), (37, 45, 75)], ids=["described", "odd"])
def test_exponentials_and_sums(tokens, width, vocabulary, options, bias, dtype, device):
    """Through tensor descriptors, and through pointers where 16 bytes do not divide a row."""
    case = make_case(tokens, width, vocabulary, dtype, device, bias=bias, ignored=False)
    if "temperature" in options:
        options = {**options, "temperature": torch.linspace(0.5, 2.0, tokens, device=device)}
    hidden, weight, bias, target = inputs(case)
    check(hidden, weight, bias, target, out_dtype=dtype, **options)


def test_a_shape_that_nothing_divides(dtype, device):
    case = make_case(fewer_interpreted(252), 507, 123, dtype, device, ignored=False)
    sums = check(*inputs(case), tile=Tile(64, 64, 128, 4, 2))
    assert (sums.gap == 0).any()


@pytest.mark.parametrize("out_dtype", [torch.float32, long_interpreted(torch.bfloat16)], ids=["fp32", "bf16"])
def test_more_row_tiles_than_share_a_stretch_of_the_vocabulary(out_dtype, device):
    case = make_case(300, 16, 72, torch.bfloat16, device, ignored=False)
    check(*inputs(case), tile=Tile(16, 32, 16, 4, 2), out_dtype=out_dtype)


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


def test_the_bias_may_be_of_any_float_dtype_and_forbid_words(dtype, device):
    hidden, weight, bias, target = inputs(make_case(20, 32, 50, dtype, device, bias=True, ignored=False))
    bias = bias.float() / 3
    bias[target[0] - 1] = -torch.inf
    target = torch.where(target == (target[0] - 1) % 50, target[0], target)
    check(hidden, weight, bias, target)


def far_case(dtype, device, logit=-200.0):
    """Every fifth token's target is a word that a bias makes impossible, by more than fp32's range or less."""
    hidden, weight, _, target = inputs(make_case(40, 32, 72, dtype, device, ignored=False))
    bias = torch.zeros(72, device=device)
    bias[3] = logit
    target = torch.where(target == 3, 4, target)
    impossible = target.clone()
    impossible[::5] = 3
    return hidden, weight, bias, target, impossible


@pytest.mark.parametrize("options", [{}, {"softcap": 300.0}], ids=str)
def test_impossible_targets_are_anchored_anew(options, dtype, device):
    """And the rows between them keep every bit, also those that are done again each time, at other places in a tile."""
    hidden, weight, bias, target, impossible = far_case(dtype, device)
    sums = check(hidden, weight, bias, impossible, **options)
    largest = oracle(sums.anchor, hidden, weight, bias, impossible, **options)[2].amax(1)
    torch.testing.assert_close(sums.anchor[::5].double(), largest[::5], rtol=1e-5, atol=1e-4)
    assert (sums.gap[::5] < -100).all()
    coarsen(hidden, weight)
    out, usual_out = torch.empty(2, 40, 72, device=device)
    sums = run(hidden, weight, bias, impossible, out=out, **options)
    usual = run(hidden, weight, bias, target, out=usual_out, **options)
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
    compare(first, torch.cat(outs, 1), hidden, weight, bias, target)


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
