import pytest
import torch

from exgrpo.kernels import importance_ratio, linear_log_prob, reference

from .support import Case, assert_as_good, error, fewer_interpreted, make_case, relative_error

SHAPES = [
    (fewer_interpreted(252), 507, 123),  # nothing a multiple of anything
    (fewer_interpreted(64), 64, 512),  # everything a power of two
    (1, 33, 77),  # one token
    (fewer_interpreted(97), 1, 5),  # hidden states of width one
    (fewer_interpreted(40), 16, 1),  # one word: log-prob 0, entropy 0
    (fewer_interpreted(33), 48, 2),
    (19, 31, 4099),  # a vocabulary far beyond tokens and width
    ((3, 17), 24, 101),  # a batch of rows
    ((2, 3, 5), 24, 101),
]
OPTIONS = [{}, {"temperature": 0.6}, {"temperature": 1.5}, {"softcap": 5.0}, {"softcap": 2.0, "temperature": 0.8}]


def outputs_and_gradients(case: Case, function=linear_log_prob, upstream=None, **more):
    result = case.log_prob(function, **more)
    dtype = result.log_prob.dtype
    loss = sum((value * up.to(dtype)).sum() for value, up in zip(result, upstream, strict=True))
    return list(result), case.gradients(loss)


def check(case: Case, backend: str, factor=2.0):
    upstream = [torch.randn(case.target.shape, device=case.target.device) for _ in range(2)]
    ours, our_gradients = outputs_and_gradients(case, upstream=upstream, backend=backend)
    plain, plain_gradients = outputs_and_gradients(case, reference.linear_log_prob, upstream)
    exact, exact_gradients = outputs_and_gradients(case.to(torch.float64), reference.linear_log_prob, upstream)
    assert all(
        value.dtype == (torch.float64 if case.hidden.dtype == torch.float64 else torch.float32) for value in ours
    )
    assert_as_good(ours, plain, exact, factor=factor)
    assert_as_good(our_gradients, plain_gradients, exact_gradients, factor=factor, measure=relative_error)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_shapes(shape, dtype, backend, device):
    check(make_case(*shape, dtype, device), backend)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_options(options, bias, dtype, backend, device):
    check(make_case(fewer_interpreted(83), 40, 211, dtype, device, bias=bias, **options), backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "softcap": 8.0}], ids=str)
def test_sixteen_bits(dtype, options, backend, device):
    """Plain torch rounds the logits to 16 bits, so being as good as it is asks little: see the next test too."""
    check(make_case(fewer_interpreted(252), 507, 123, dtype, device, bias=True, **options), backend, factor=1.0)


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


def test_only_one_output_used(backend, device):
    case = make_case(fewer_interpreted(40), 16, 50, torch.float64, device)
    for name in ("log_prob", "entropy"):
        ours = case.gradients(getattr(case.log_prob(backend=backend), name).sum())
        exact = case.gradients(getattr(case.log_prob(reference.linear_log_prob), name).sum())
        torch.testing.assert_close(ours, exact)


def test_gradients_of_some_tokens_only(backend, device):
    """Tokens without upstream gradient are skipped, and change nothing."""
    case = make_case(36, 16, 50, torch.float64, device)
    upstream = [torch.randn(36, dtype=torch.float64, device=device) for _ in range(2)]
    upstream[0][8:28] = 0
    upstream[1][12:32] = 0
    _, ours = outputs_and_gradients(case, upstream=upstream, backend=backend)
    _, exact = outputs_and_gradients(case, reference.linear_log_prob, upstream)
    torch.testing.assert_close(ours, exact)
    assert not ours[0][12:28].any()


def test_ignored_positions(backend, device):
    """They are 0 and their hidden states are never read: not even NaN there does any harm."""
    case = make_case((4, 10), 16, 50, torch.float32, device, ignore_index=7)
    case.target[case.target == -100] = 7
    with torch.no_grad():
        case.hidden[case.target == 7] = torch.nan
    result = case.log_prob(backend=backend)
    gradients = case.gradients(result.log_prob.sum() + result.entropy.sum())
    for values in result:
        assert not values[case.target == 7].any()
        assert values.isfinite().all()
    assert not gradients[0][case.target == 7].any()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (4,), (2, 3)])
def test_nothing_to_do(shape, backend, device):
    """An empty batch, or all ignored: zeros that still belong to the graph."""
    case = make_case(shape, 8, 20, torch.float32, device, bias=True)
    case.target.fill_(-100)
    result = case.log_prob(backend=backend)
    assert result.log_prob.shape == result.entropy.shape == shape
    assert result.log_prob.requires_grad
    assert not result.log_prob.any()
    for leaf, gradient in zip(case.leaves, case.gradients(sum(x.sum() for x in result)), strict=True):
        assert gradient.shape == leaf.shape
        assert not gradient.any()


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


def test_no_grad_gives_the_same_values(backend, device):
    case = make_case(30, 16, 50, torch.float32, device)
    with torch.no_grad():
        quiet = case.log_prob(backend=backend)
    assert not quiet.log_prob.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(quiet, case.log_prob(backend=backend), strict=True))
