"""Under torch.compile, in one piece: the values, gradients and errors of eager calls, whatever changes between them.

It is the same for all backends: the compiler sees the operators alone.
"""

import pytest
import torch
from torch._dynamo.exc import Unsupported

from exgrpo import kernels

from .support import make_case, make_tokens, needs_inductor

HEAD = {"temperature": (0.7, 1.3, 2.0, 1.1), "softcap": (5.0, 20.0, 9.0, 30.0)}
TERMS = {
    "entropy_coef": (0.1, 0.3, 0.02, 0.5),
    "normalizer": (7.0, 3.0, 11.0, 40.0),
    "beta": (0.1, 0.5, 2.0, 0.2),
    "clip": ((0.2, 0.2), (0.1, 0.3), (0.05, 0.4), (0.3, 0.1)),
}
NUMBERS = {
    "linear_log_prob": HEAD,
    "linear_policy_loss": HEAD | TERMS,
    "sequence_entropy": HEAD,
    "policy_loss": TERMS,
    "shape_ratio": {"beta": TERMS["beta"]},
    "group_advantage": {},
    "importance_ratio": {},
}
"""The numbers among the arguments, and what they are from call to call."""


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def call_of(name):
    """A function of two differentiable tensors, the integer tensor and the per-token ones of a case, and of options."""

    def run(hidden, weight, target, old, advantage, replayed, **options):
        if name == "linear_log_prob":
            log_prob, entropy = kernels.linear_log_prob(hidden, weight, target, **options)
            return (log_prob * advantage).sum() + entropy.sum()
        if name == "linear_policy_loss":
            more = {"replayed": replayed} | options
            return kernels.linear_policy_loss(hidden, weight, target, old, advantage, **more).loss
        if name == "sequence_entropy":
            rows, length = target.shape
            bounds = length * torch.arange(rows + 1, device=target.device)
            flat, flat_target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
            means = kernels.sequence_entropy(flat, weight, flat_target, bounds, **options)
            return means.sum() + (hidden.sum() + weight.sum()) * 0
        log_prob = 3 * torch.log_softmax(hidden @ weight.T, -1)[..., 0]
        if name == "policy_loss":
            entropy = -log_prob * log_prob.exp()
            more = {"replayed": replayed, "entropy": entropy} | options
            return kernels.policy_loss(log_prob, old, advantage, mask=target >= 0, **more).loss
        if name == "group_advantage":
            return (log_prob[:, 0] * kernels.group_advantage(advantage[:, 0], target[:, 1], **options)).sum()
        ratio = kernels.importance_ratio(log_prob, old)
        return (kernels.shape_ratio(ratio, **options) if name == "shape_ratio" else ratio).sum()

    return run


def inputs(rows, length, device):
    case = make_case((rows, length), 16, 30, torch.float32, device)
    return case.hidden, case.weight, case.target, *make_tokens(case)


def assert_as_eager(compiled, run, arguments, **options):
    leaves = arguments[:2]
    found, expected = compiled(*arguments, **options), run(*arguments, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaves) for loss in (found, expected)), rtol=1e-5, atol=1e-6)


def numbers_of(name, call):
    return {option: values[call] for option, values in NUMBERS[name].items()}


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [name for name, numbers in NUMBERS.items() if numbers])
def test_numbers_that_change(name, dynamic, device):
    """They are computed with, and compiled for at most twice: as they are, and as symbols."""
    run, arguments = call_of(name), inputs(4, 6, device)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for call, stance in enumerate(("default", "default", "fail_on_recompile", "fail_on_recompile")):
        with torch.compiler.set_stance(stance):
            assert_as_eager(compiled, run, arguments, **numbers_of(name, call))


@pytest.mark.parametrize("name", NUMBERS)
def test_sizes_that_change(name, device):
    run = call_of(name)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for call, (rows, length) in enumerate(((4, 6), (3, 5), (7, 2), (2, 9))):
        with torch.compiler.set_stance("fail_on_recompile" if call else "default"):
            assert_as_eager(compiled, run, inputs(rows, length, device), **numbers_of(name, call))


WRONG = {
    "target": (torch.tensor([0, 1, 2, 3, 10**9, 5]), r"values in \[0, 30\) or -100 .* 1000000000 at position 4"),
    "temperature": (torch.tensor([1.0, 1, 1, -2, 1, 1]), "finite numbers above 0; 1 of 6 .* -2.0 at position 3"),
    "old_log_prob": (torch.tensor([-1.0, -1, -torch.inf, -1, -1, -1]), "no -inf, .* 1 of 6 .* at position 2"),
    "normalizer": (torch.tensor(0.0), "a number above 0; 1 of 1 .* 0.0"),
}


@needs_inductor
@pytest.mark.skipif(torch.cuda.is_available(), reason="what is on a GPU is not waited for: it ends the process")
@pytest.mark.parametrize("argument", WRONG)
def test_a_wrong_value_raises(argument):
    """In the code that was compiled for right values."""
    right = {"target": torch.arange(6), "temperature": torch.ones(6), "normalizer": torch.tensor(3.0)}
    right |= {"old_log_prob": torch.full((6,), -1.0), "advantage": torch.randn(6)}
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(30, 8)

    def run(values):
        return kernels.linear_policy_loss(hidden, weight, **right | {argument: values}).loss

    compiled = torch.compile(run, fullgraph=True)
    torch.testing.assert_close(compiled(right[argument]), run(right[argument]))
    wrong, expected = WRONG[argument]
    for call in (run, compiled):
        with pytest.raises(ValueError, match=f"{argument}: expected {expected}"):
            call(wrong)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_wrong_number_raises(fullgraph, device):
    """While it is a symbol; where nothing but one graph is wanted, the error is the compiler's, and quotes ours."""
    run, arguments = call_of("linear_policy_loss"), inputs(4, 6, device)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=fullgraph)
    for value in ((0.2, 0.2), (0.3, 0.3)):
        assert_as_eager(compiled, run, arguments, clip=value)
    with pytest.raises(Unsupported if fullgraph else ValueError, match=r"clip\[0\]: expected a number of at most 1"):
        compiled(*arguments, clip=(2.0, 0.2))
