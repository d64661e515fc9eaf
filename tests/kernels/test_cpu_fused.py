"""bfloat16 products of the CPU backend, whose tiles become exponentials, against float64 on the same numbers."""

import pytest
import torch

from exgrpo.kernels import extension, linear_log_prob

if extension.MISSING:
    pytest.skip(extension.MISSING, allow_module_level=True)
if extension.OPERATORS.product_unavailable():
    pytest.skip(extension.OPERATORS.product_unavailable(), allow_module_level=True)

from exgrpo.kernels.cpu_chunks import cpu_fused, cpu_passes

from .support import assert_as_good, error, make_case, make_tokens, relative_error

SHAPES = [(1, 1, 1), (5, 3, 15), (12, 33, 17), (45, 40, 131), (30, 130, 1031)]


@pytest.fixture
def made(monkeypatch):
    """The passes that were made, by class."""
    monkeypatch.setenv("EXGRPO_SELF_TEST", "0")  # whose passes would be listed too
    seen = []
    original = cpu_passes.CpuPasses.__init__
    monkeypatch.setattr(
        cpu_passes.CpuPasses, "__init__", lambda self, head: (seen.append(type(self)), original(self, head))[1]
    )
    return seen


@pytest.mark.parametrize("options", [{}, {"temperature": True, "bias": True}], ids=["", "all"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
def test_policy_loss(options, shape, entropy_coef, made, monkeypatch):
    """Every fourth token is clipped: without entropy it is taken out of the gradient products."""
    monkeypatch.setattr(cpu_fused, "MOST_ROWS", 20)  # a chunk's
    if options:
        options = options | {"temperature": torch.linspace(0.5, 2.0, shape[0])}
    case = make_case(*shape, torch.bfloat16, "cpu", **options)
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


def test_the_librarys_product(monkeypatch, made):
    """Of capped logits, whose exponentials do not tell how steep a cap is; under autocast; and by the environment."""
    case = make_case(20, 16, 40, torch.bfloat16, "cpu")
    linear_log_prob(case.hidden, case.weight, case.target, softcap=5.0, backend="cpu")
    with torch.autocast("cpu", torch.bfloat16):
        linear_log_prob(case.hidden.float(), case.weight.float(), case.target, backend="cpu")
    monkeypatch.setenv("EXGRPO_CPU_PRODUCT", "none")
    linear_log_prob(case.hidden, case.weight, case.target, backend="cpu")
    assert set(made) == {cpu_passes.CpuPasses}
    monkeypatch.setenv("EXGRPO_CPU_PRODUCT", "avx512bf16")
    linear_log_prob(case.hidden, case.weight, case.target, backend="cpu")
    assert made[-1] is cpu_fused.FusedCpuPasses
    monkeypatch.setenv("EXGRPO_CPU_PRODUCT", "avx1024")
    with pytest.raises(RuntimeError, match="EXGRPO_CPU_PRODUCT=avx1024: expected amx, avx512bf16 or none"):
        linear_log_prob(case.hidden, case.weight, case.target, backend="cpu")
