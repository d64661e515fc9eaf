"""The Triton backend with its own product, where the launch table says so: same results as with a library's product."""

import os
import re

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET")):
    pytest.skip("Triton kernels need a GPU, or TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from exgrpo.kernels import linear_log_prob, linear_policy_loss, reference
from exgrpo.kernels.triton_chunks import fused_product, launch, triton_fused, triton_passes, triton_tokens

from .support import coarsen, compare, error, fewer_interpreted, make_case, make_tokens
from .test_extremes import check_impossible_targets


@pytest.fixture(params=["bfloat16", "float16"])
def dtype(request, set_plan):
    """A dtype of fused products, in small tiles."""
    set_plan(fused=True, tile=launch.Tile(32, 32, 32, 4, 2))
    return getattr(torch, request.param)


@pytest.fixture
def made(monkeypatch):
    """The rows that were made, by class."""
    monkeypatch.setenv("EXGRPO_SELF_TEST", "0")  # whose passes would be listed too
    seen = []
    forget = triton_passes.TritonPasses.__init__
    monkeypatch.setattr(
        triton_passes.TritonPasses, "__init__", lambda self, *rest: (seen.append(type(self)), forget(self, *rest))[1]
    )
    return seen


def test_a_bound_that_the_backward_cannot_meet_is_refused_before_the_forward(dtype, device):
    """The forward of the fused product has no exponentials, and could do with less."""
    case = make_case(20, 32, 64, dtype, device)
    with pytest.raises(ValueError, match=r"needs \d+ bytes at least, got 1$") as raised:
        case.log_prob(backend="triton", memory=1)
    least = int(re.search(r"needs (\d+)", str(raised.value))[1])
    with pytest.raises(ValueError, match=f"needs {least} bytes at least"):
        case.log_prob(backend="triton", memory=least - 1)
    case.log_prob(backend="triton", memory=least).log_prob.sum().backward()


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_number_in_a_tensor_is_the_temperature_of_every_token(shape, dtype, device, made):
    """Its entries for the tokens lie in one place, and the kernels read a row of numbers."""
    case = make_case(20, 32, 64, dtype, device, ignored=False)
    case.options["temperature"] = 0.5
    right = case.log_prob(linear_log_prob, backend="triton")
    case.options["temperature"] = torch.full(shape, 0.5, device=device).expand(shape and (20,))
    for mine, true in zip(case.log_prob(linear_log_prob, backend="triton"), right, strict=True):
        assert torch.equal(mine, true)
    assert set(made) == {triton_fused.FusedTritonPasses}


SHAPES = {
    "described": (36, 64, 72),
    "odd": (35, 45, 37),  # through pointers, where 16 bytes do not divide a row
    "nothing divides it": (fewer_interpreted(252), 507, 123),
    "many row tiles": (530, 16, 40),  # more than share a stretch of the vocabulary
}


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_and_gradients(shape, biased, dtype, device, made):
    """As good as plain torch; and a product of 16-bit numbers is exact in float32, so values have the error of sums."""
    case = make_case(*shape, dtype, device, bias=biased, ignored=False)
    if biased:
        case.bias = (case.bias.detach().float() / 3).requires_grad_()
        case.options["temperature"] = torch.linspace(0.5, 2.0, shape[0], device=device)
    upstream = torch.randn(2, shape[0], device=device)

    def call(some, backend):
        found = some.log_prob(linear_log_prob, backend=backend)
        return [one.detach() for one in found], some.gradients((torch.stack(tuple(found)) * upstream).sum())

    compare(call, case, "triton")
    exact = case.to(torch.float64)
    exact.bias = None if case.bias is None else case.bias.double()
    for mine, true in zip(call(case, "triton")[0], exact.log_prob(reference.linear_log_prob), strict=True):
        assert error(mine, true) <= 2e-5
    assert set(made) == {triton_fused.FusedTritonPasses}


def test_words_ruled_out_by_the_bias(dtype, device):
    """As if they were not there."""
    case = make_case(20, 32, 50, dtype, device, bias=True, ignored=False)
    case.target.clamp_(max=40)
    some = [values.detach()[:41] for values in (case.weight, case.bias)]
    with torch.no_grad():
        case.bias[41:] = -torch.inf
    found = case.log_prob(linear_log_prob, backend="triton")
    expected = linear_log_prob(case.hidden, some[0], case.target, bias=some[1], backend="triton")
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-5, atol=1e-5)


def test_impossible_targets_and_certain_ones(dtype, device):
    check_impossible_targets(dtype, "triton", device)


def test_a_cap_takes_the_librarys_product(dtype, device, made):
    """The exponentials do not tell how steep a cap is."""
    case = make_case(20, 16, 40, dtype, device)
    linear_log_prob(case.hidden, case.weight, case.target, softcap=5.0, backend="triton")
    assert set(made) == {triton_passes.TritonPasses}


def test_weights_of_any_strides_and_pointers_in_the_place_of_descriptors(dtype, device, monkeypatch):
    """A machine without descriptors has the whole tile's pointers, one with them half of it where strides are odd."""
    case = make_case(20, 32, 50, dtype, device, ignored=False)
    hidden, weight, target = case.hidden.detach(), case.weight.detach(), case.target
    expected = linear_log_prob(hidden, weight, target, backend="triton")
    scattered = weight.new_full((100, 96), torch.nan)
    wide = weight.new_full((50, 96), torch.nan)
    scattered[::2, 16:80:2] = wide[:, 16:48] = weight
    for view in (wide[:, 16:48], scattered[::2, 16:80:2], weight.T.contiguous().T):
        found = linear_log_prob(hidden, view, target, backend="triton")
        torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-5, atol=1e-5)
    without = fused_product.Traits(described=False, overlapped=False, parts=1)
    monkeypatch.setattr(fused_product, "traits", lambda name: without)
    found = linear_log_prob(hidden, weight, target, backend="triton")
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-5, atol=1e-5)


def policy_loss_of(case):
    """A function that computes log-probs, entropies and gradients."""
    old, advantage, _ = make_tokens(case)

    def run():
        result = linear_policy_loss(case.hidden, case.weight, case.target, old, advantage, backend="triton")
        return [result.log_prob, result.entropy, *case.gradients(result.loss)]

    return run


def test_same_bits_in_any_chunks(dtype, device, set_chunk):
    """Nothing but the product, which is exact here, may depend on where a row stands in its chunk."""
    case = make_case(40, 32, 150, dtype, device)
    coarsen(case.hidden, case.weight)
    run = policy_loss_of(case)
    whole = run()
    set_chunk(16 * 150 * 4)
    assert all(torch.equal(a, b) for a, b in zip(whole[:2], run()[:2], strict=True))


@pytest.mark.parametrize("entries", [1, 16, 33, 100])
def test_few_programs_scale_all_entries_and_a_factor_of_one_touches_none(entries, device, monkeypatch):
    monkeypatch.setattr(triton_tokens, "MOST_PROGRAMS", 2)
    monkeypatch.setattr(triton_tokens, "SCALE_BLOCK", 16)
    before = torch.randn(entries + 1, device=device)
    values = before.clone()
    triton_tokens.scale(values[:-1], torch.tensor(0.3, device=device))
    assert torch.equal(values, torch.cat((before[:-1] * 0.3, before[-1:])))
    # Any arithmetic would make a quiet NaN of a signalling one, multiplication by 1 too.
    signalling = torch.full((entries,), 0x7F800001, dtype=torch.int32, device=device)
    triton_tokens.scale(signalling.view(torch.float32), torch.tensor(1.0, device=device))
    assert (signalling == 0x7F800001).all()
