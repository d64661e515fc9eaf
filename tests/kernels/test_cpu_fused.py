"""bfloat16 products of the CPU backend, whose tiles become exponentials, against float64 on the same numbers."""

import pytest
import torch

from exgrpo.kernels import extension, linear_log_prob, linear_policy_loss, reference

if extension.MISSING:
    pytest.skip(extension.MISSING, allow_module_level=True)
if extension.OPERATORS.product_unavailable():
    pytest.skip(extension.OPERATORS.product_unavailable(), allow_module_level=True)

from exgrpo.kernels.cpu_chunks import cpu_fused, cpu_passes

from .support import assert_as_good, error, make_case, make_tokens, relative_error

OPERATORS = extension.OPERATORS
SHAPES = [(1, 1, 1), (5, 3, 15), (12, 33, 17), (24, 64, 32), (70, 100, 100), (30, 130, 1031)]
EPSILON = 2.0**-23
ROUNDING = 2.0**-8  # of bfloat16


def make_operands(count, width, vocabulary):
    """Hidden states, weight, bias, temperature and target of a head whose logits are a few nats wide."""
    hidden = torch.randn(count, width).bfloat16()
    weight = (2 * torch.randn(vocabulary, width) / width**0.5).bfloat16()
    return hidden, weight, torch.randn(vocabulary), 0.5 + torch.rand(count), torch.randint(0, vocabulary, (count,))


def wide(rows, columns, gap=7):
    """A matrix of sevens whose rows have a gap between them, and all of its memory."""
    memory = torch.full((rows, columns + gap), 7.0, dtype=torch.bfloat16)
    return memory[:, :columns], memory


@pytest.fixture
def made(monkeypatch):
    """The passes that were made, by class."""
    seen = []
    original = cpu_passes.CpuPasses.__init__
    monkeypatch.setattr(
        cpu_passes.CpuPasses, "__init__", lambda self, head: (seen.append(type(self)), original(self, head))[1]
    )
    return seen


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums(shape):
    """d has the error of a float32 product, exp(d) that of d relative to itself, the sums that of their terms."""
    hidden, weight, bias, temperature, target = make_operands(*shape)
    target[::3] = -1
    held = (target >= 0).unsqueeze(1)
    logits = hidden.double() @ weight.double().t() + bias.double()
    index = target.clamp(min=0).unsqueeze(1)
    at_target = OPERATORS.product_target_logits(hidden, weight, bias, target)
    largest = OPERATORS.product_largest(hidden, weight, bias)
    slack = 8 * EPSILON * (hidden.double().abs() @ weight.double().abs().t() + bias.double().abs()).max().item()
    assert error(largest, logits.amax(1)) <= slack
    assert error(at_target[target >= 0], logits.gather(1, index).squeeze(1)[target >= 0]) <= slack
    assert torch.equal(at_target.isinf(), target < 0)
    anchor = torch.where(target < 0, largest, at_target)
    out, memory = wide(*logits.shape)
    rest, moment = OPERATORS.product_sums(hidden, weight, bias, target, anchor, temperature, out, None)
    d = (logits - anchor.double().unsqueeze(1)) / temperature.double().unsqueeze(1)
    exact = torch.where(held & (torch.arange(shape[2]) == index), 0.0, d.exp())
    slack = 2 * slack / temperature.min().item() + 4 * EPSILON
    assert (out.double() - exact).abs().le((ROUNDING + slack) * exact).all()
    assert (memory[:, shape[2] :] == 7).all()
    assert (rest - exact.sum(1)).abs().le(slack * exact.sum(1)).all()
    assert (moment - (exact * d).sum(1)).abs().le(slack * (exact * (1 + d.abs())).sum(1)).all()
    without = OPERATORS.product_sums(hidden, weight, bias, target, anchor, temperature, None, None)
    assert torch.equal(without[0], rest)
    assert torch.equal(without[1], moment)


@pytest.mark.parametrize("options", [{}, {"temperature": torch.linspace(0.5, 2.0, 45), "bias": True}], ids=["", "all"])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
def test_policy_loss(options, entropy_coef, made, monkeypatch):
    """Every fourth token is clipped: without entropy it is taken out of the gradient products."""
    monkeypatch.setattr(cpu_fused, "MOST_ROWS", 20)  # a chunk's
    case = make_case(45, 40, 131, torch.bfloat16, "cpu", **options)
    old, advantage, replayed = make_tokens(case)
    old[::4] -= 2.0
    advantage[::4] = 1.0
    replayed[::4] = False

    def call(some, backend):
        more = {"replayed": replayed, "entropy_coef": entropy_coef, "clip": (0.5, 0.9), "backend": backend}
        result = some.policy_loss(old, advantage, **more)
        return [result.log_prob, result.entropy], some.gradients(result.loss)

    ours, gradients = call(case, "cpu")
    exact, exact_gradients = call(case.to(torch.float64), "reference")
    plain, plain_gradients = call(case.to(torch.bfloat16), "reference")
    assert_as_good(ours, plain, exact, factor=0.1)
    # F is rounded to bfloat16 once, which plain torch does too.
    assert_as_good(gradients, plain_gradients, exact_gradients, factor=1.5, measure=relative_error)
    assert set(made) == {cpu_fused.FusedCpuPasses}


def test_any_number_of_threads(set_threads):
    """Whole tiles for each of them may be more than there are rows."""
    gradient, weight = torch.rand(100, 101).bfloat16(), torch.rand(101, 16).bfloat16()
    expected = OPERATORS.product_hidden_gradient(gradient, weight)
    for threads in (3, 7):
        set_threads(threads)
        assert torch.equal(OPERATORS.product_hidden_gradient(gradient, weight), expected)


def test_a_large_vocabulary():
    """Sums of 150,000 terms have no error of their own."""
    case = make_case(24, 64, 151_936, torch.bfloat16, "cpu", ignored=False)
    with torch.no_grad():
        log_prob, entropy = case.log_prob(linear_log_prob, backend="cpu")
        exact = case.to(torch.float64).log_prob(reference.linear_log_prob)
    assert error(log_prob, exact.log_prob) <= 3e-6
    assert error(entropy, exact.entropy) <= 1e-5


def test_strided_operands(made):
    """A weight whose rows are apart is taken as it is; one whose columns are, by the other passes."""
    case = make_case(30, 16, 50, torch.bfloat16, "cpu", ignored=False)
    hidden, weight, target = case.hidden.detach(), case.weight.detach(), case.target
    whole = linear_log_prob(hidden, weight, target, backend="cpu").log_prob
    apart = torch.cat((weight, weight.neg()), 1)[:, :16]
    assert torch.equal(linear_log_prob(hidden.t().contiguous().t(), apart, target, backend="cpu").log_prob, whole)
    assert set(made) == {cpu_fused.FusedCpuPasses}
    turned = linear_log_prob(hidden, weight.t().contiguous().t(), target, backend="cpu").log_prob
    assert made[-1] is cpu_passes.CpuPasses
    assert error(turned, whole) <= 1e-5


def test_a_cap_and_autocast_take_the_librarys_product(made):
    """The exponentials do not tell how steep a cap is; a weight of another dtype would have to be converted first."""
    case = make_case(20, 16, 40, torch.bfloat16, "cpu")
    linear_log_prob(case.hidden, case.weight, case.target, softcap=5.0, backend="cpu")
    with torch.autocast("cpu", torch.bfloat16):
        linear_log_prob(case.hidden.float(), case.weight.float(), case.target, backend="cpu")
    assert set(made) == {cpu_passes.CpuPasses}


def test_the_environment_forbids_and_forces(monkeypatch, made):
    case = make_case(20, 16, 40, torch.bfloat16, "cpu")
    monkeypatch.setenv("EXGRPO_CPU_PRODUCT", "none")
    linear_policy_loss(case.hidden, case.weight, case.target, torch.zeros(20), torch.ones(20), backend="cpu")
    assert set(made) == {cpu_passes.CpuPasses}
    monkeypatch.setenv("EXGRPO_CPU_PRODUCT", "avx512bf16")
    linear_log_prob(case.hidden, case.weight, case.target, backend="cpu")
    assert made[-1] is cpu_fused.FusedCpuPasses
    monkeypatch.setenv("EXGRPO_CPU_PRODUCT", "avx1024")
    with pytest.raises(RuntimeError, match="EXGRPO_CPU_PRODUCT=avx1024: expected amx, avx512bf16 or none"):
        linear_log_prob(case.hidden, case.weight, case.target, backend="cpu")
