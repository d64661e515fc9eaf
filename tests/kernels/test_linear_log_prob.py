import pytest
import torch

from exgrpo.kernels import importance_ratio, linear_log_prob, reference
from exgrpo.kernels.chunks.head import ChunkedHead

from .support import Case, compare, error, fewer_interpreted, make_case


def outputs_and_gradients(case: Case, function=linear_log_prob, upstream=None, **more):
    result = case.log_prob(function, **more)
    dtype = result.log_prob.dtype
    loss = sum((value * up.to(dtype)).sum() for value, up in zip(result, upstream, strict=True))
    return list(result), case.gradients(loss)


@pytest.mark.parametrize(("dtype", "better"), [(torch.bfloat16, 1000), (torch.float16, 100)])
def test_logits_of_sixteen_bit_inputs_are_not_rounded(dtype, better, backend, device):
    """Products of 16-bit numbers are exact in float32, so the error is that of float32 sums whatever the inputs.

    The importance ratio of a policy that has not changed is 1 to the same precision: an error of the log-probability
    is a relative error of the ratio.
    """
    case = make_case(fewer_interpreted(256), 256, 2000, dtype, device)
    exact = case.to(torch.float64).log_prob(reference.linear_log_prob)
    plain = case.log_prob(reference.linear_log_prob)
    ours = case.log_prob(backend=backend)
    for mine, theirs, true in zip(ours, plain, exact, strict=True):
        assert error(mine, true) <= 1e-5
        assert error(mine, true) * better <= error(theirs, true)
    ratio = importance_ratio(ours.log_prob.double(), exact.log_prob)
    assert error(ratio, torch.ones_like(ratio)) <= 1e-5


@pytest.mark.parametrize("alone", [None, 0, 1], ids=["both outputs", "entropy", "log_prob"])
def test_gradients_of_some_tokens_and_outputs_only(alone, backend, device):
    """What has no upstream gradient is skipped, and changes nothing."""
    case = make_case(36, 16, 50, torch.float64, device)
    upstream = [torch.randn(36, dtype=torch.float64, device=device) for _ in range(2)]
    if alone is not None:
        upstream[alone].zero_()
    upstream[0][8:28] = 0
    upstream[1][12:32] = 0
    _, ours = outputs_and_gradients(case, upstream=upstream, backend=backend)
    _, exact = outputs_and_gradients(case, reference.linear_log_prob, upstream)
    torch.testing.assert_close(ours, exact)
    assert not ours[0][12:28].any()


OPTIONS = {
    "plain": {},
    "shaped": {"bias": True, "softcap": 9.0, "temperature": torch.linspace(0.6, 1.5, 30)},
    "no token is left out": {"bias": True, "ignored": False},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("added", [False, True], ids=["", "added"])
def test_the_backward_goes_through_slices_of_the_vocabulary(
    added, name, dtype, backend, device, set_chunk, monkeypatch
):
    """Where the tokens are fewer, each slice has all of them: the gradient of its weights is complete, written once."""
    slices, made = [], ChunkedHead.part
    monkeypatch.setattr(ChunkedHead, "part", lambda walk, entries: slices.append(entries) or made(walk, entries))
    monkeypatch.setenv("EXGRPO_SELF_TEST", "0")
    set_chunk(11 * 150 * 4)
    case = make_case(30, 24, 150, dtype, device, **OPTIONS[name])
    upstream = [torch.randn(30, dtype=torch.float64, device=device) for _ in range(2)]
    if OPTIONS[name].get("ignored", True):
        upstream[0][:2] = upstream[1][:2] = 0
    total = torch.ones_like(case.weight, dtype=torch.float64 if dtype == torch.float64 else torch.float32)

    def call(some, function):
        if not (added and some is case and function != "reference"):
            return outputs_and_gradients(some, upstream=upstream, backend=function)
        result = some.log_prob(backend=function, weight_grad=total.detach())
        sum((value * up.to(value.dtype)).sum() for value, up in zip(result, upstream, strict=True)).backward()
        rest = [] if some.bias is None else [some.bias.grad]
        return list(result), [some.hidden.grad, (total - 1).to(dtype), *rest]

    compare(call, case, backend, factor=2 + 2 * added)  # what is added to 1 has its digits
    assert bool(slices) == (backend in ("triton", "cuda"))  # on a CPU, the others are no faster so
    assert [entries.start for entries in slices[1:]] == [entries.stop for entries in slices[:-1]]


def test_non_contiguous_inputs(backend, device):
    dense = make_case((3, 7), 32, 75, torch.float64, device, bias=True)
    hidden = dense.hidden.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    weight = dense.weight.detach().T.contiguous().T.requires_grad_()
    bias = dense.bias.detach().repeat_interleave(2)[::2].requires_grad_()
    target = dense.target.repeat_interleave(2, 1)[:, ::2]
    loose = Case(hidden, weight, target, bias)
    assert not any(x.is_contiguous() for x in (hidden, weight, bias, target))
    upstream = [torch.randn(3, 7, device=device) for _ in range(2)]
    ours, gradients = outputs_and_gradients(loose, upstream=upstream, backend=backend)
    exact, exact_gradients = outputs_and_gradients(dense, reference.linear_log_prob, upstream)
    torch.testing.assert_close(ours + gradients, exact + exact_gradients)
