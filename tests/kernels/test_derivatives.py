"""Derivatives other than the first in reverse mode: an error that says so, or right. Never silently zero."""

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

from exgrpo.kernels import (
    group_advantage,
    importance_ratio,
    linear_log_prob,
    linear_policy_loss,
    policy_loss,
    reference,
    sequence_entropy,
    shape_ratio,
)

from .support import make_case, make_tokens

NAMES = ["linear_log_prob", "linear_policy_loss", "policy_loss", "sequence_entropy", "group_advantage"]
DIFFERENTIABLE = NAMES[:3]


def scalar_of(name, device, kernels=None):
    """A function of one tensor that one of the operations is part of, and where to evaluate it.

    ``kernels``: the module whose functions are taken in place of the public ones.
    """
    case = make_case(6, 4, 9, torch.float64, device)
    hidden, weight, target = case.hidden.detach(), case.weight.detach(), case.target
    old, advantage, replayed = make_tokens(case)
    terms = {"replayed": replayed, "clip": None}
    bounds = torch.tensor([0, 2, 6], device=device)

    def taken(function):
        return getattr(kernels, function.__name__) if kernels else function

    def of_log_prob(x):
        log_prob, entropy = taken(linear_log_prob)(x, weight, target)
        return (log_prob * advantage + entropy).sum()

    def of_linear_policy_loss(x):
        return taken(linear_policy_loss)(x, weight, target, old, advantage, entropy_coef=0.1, **terms).loss

    def of_policy_loss(x):
        return taken(policy_loss)(x[:, 0], old, advantage, entropy=x[:, 1], entropy_coef=0.1, **terms).loss

    def of_sequence_entropy(x):
        return taken(sequence_entropy)(x, weight, target, bounds).sum()

    def of_group_advantage(x):
        return taken(group_advantage)(x[:, 0], target % 2).square().sum()

    functions = (of_log_prob, of_linear_policy_loss, of_policy_loss, of_sequence_entropy, of_group_advantage)
    return dict(zip(NAMES, functions, strict=True))[name], hidden


def dual(run, x):
    with forward_ad.dual_level():
        return run(forward_ad.make_dual(x, torch.ones_like(x)))


WAYS = {
    "forward": {
        "forward_ad": dual,
        "jvp": lambda run, x: func.jvp(run, (x,), (torch.ones_like(x),)),
        "jvp of vmap": lambda run, x: func.jvp(func.vmap(run), (x[None],), (x[None],)),
        "jvp without grad": lambda run, x: func.jvp(torch.no_grad()(run), (x,), (torch.ones_like(x),)),
        "jvp beneath grad": lambda run, x: func.jvp(lambda y: func.grad(lambda z: run(y) * z)(x[0, 0]), (x,), (x,)),
        "hessian": lambda run, x: func.hessian(run)(x),
        "compiled": lambda run, x: torch.compile(lambda y: func.jvp(run, (y,), (y,)), backend="aot_eager")(x),
    },
    "reverse": {
        "grad": lambda run, x: func.grad(run)(x),
        "jacrev": lambda run, x: func.jacrev(run)(x),
        "vmap of grad": lambda run, x: func.vmap(func.grad(run))(x[None]),
        "compiled grad": lambda run, x: torch.compile(func.grad(run), backend="aot_eager")(x),
    },
    "second": {
        "create_graph": lambda run, x: torch.autograd.grad(run(x), x, create_graph=True),
        "autograd's hessian": torch.autograd.functional.hessian,
    },
}
EXPECTED = {
    "forward": "has no forward-mode derivatives.*use exgrpo.kernels.reference",
    "reverse": r"has no derivatives by torch\.func.*only by torch\.autograd",
    "second": "has no second derivatives.*without create_graph=True.*reference",
}
REFUSED = [
    pytest.param(name, mode, run, id=f"{name}, {way}")
    for name in NAMES
    for mode, ways in WAYS.items()
    for way, run in ways.items()
    # The operators are alike but for those without derivatives: all ways of one, and some of all.
    if name == "linear_log_prob" or way in ("jvp", "grad") or (mode == "second" and name in DIFFERENTIABLE)
]


@pytest.mark.parametrize(("name", "mode", "way"), REFUSED)
def test_what_is_not_there_is_refused(name, mode, way, device):
    run, x = scalar_of(name, device)
    expected = EXPECTED[mode] if name in DIFFERENTIABLE else "has no"
    with pytest.raises(RuntimeError, match=f"{name} {expected}"):
        way(run, x.requires_grad_(mode == "second"))


@pytest.mark.parametrize("name", DIFFERENTIABLE[:2])
@pytest.mark.parametrize(("frozen", "compiled"), [((), True), (("hidden",), False), (("weight",), False)])
def test_vmap_gives_what_a_loop_gives(name, frozen, compiled, device):
    """Values and gradients, of what is mapped over and of what is not."""
    case = make_case((3, 6), 4, 9, torch.float64, device)
    target = case.target[0]
    old, advantage, _ = (values[0] for values in make_tokens(case))

    def run(hidden, weight):
        if name == "linear_policy_loss":
            return linear_policy_loss(hidden, weight, target, old, advantage, entropy_coef=0.1).loss
        log_prob, entropy = linear_log_prob(hidden, weight, target)
        return (log_prob * advantage + entropy).sum()

    leaves = {"hidden": case.hidden, "weight": case.weight}
    for leaf in frozen:
        leaves[leaf].requires_grad_(False)
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    factor = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64, device=device)
    mapped = func.vmap(run, (0, None))
    if compiled:
        mapped = torch.compile(mapped, backend="aot_eager")
    found = mapped(case.hidden, case.weight)
    expected = torch.stack([run(one, case.weight) for one in case.hidden])
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad((values * factor).sum(), wanted) for values in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_ratios_have_all_derivatives(device):
    """r = exp(l) is its own derivative; f = w / (w + b) has f' = b / (w + b)^2 and f'' = -2 b / (w + b)^3."""
    log_ratio = torch.tensor([-3.0, -0.2, 0.0, 1.5], dtype=torch.float64, device=device)
    old = torch.full_like(log_ratio, -2.0)
    ratio, beta = log_ratio.exp(), 0.3

    def check(run, x, first, second):
        torch.testing.assert_close(func.jvp(run, (x,), (torch.ones_like(x),))[1], first)
        torch.testing.assert_close(func.grad(lambda y: run(y).sum())(x), first)
        torch.testing.assert_close(func.hessian(lambda y: run(y).sum())(x), second.diag())
        torch.testing.assert_close(torch.autograd.functional.hessian(lambda y: run(y).sum(), x), second.diag())

    check(lambda x: importance_ratio(x, old), old + log_ratio, ratio, ratio)
    check(lambda w: shape_ratio(w, beta), ratio, beta / (ratio + beta) ** 2, -2 * beta / (ratio + beta) ** 3)


@pytest.mark.parametrize("name", NAMES)
def test_reference_has_all_derivatives(name, device):
    """What the errors send to. Finite differences of the values and of the gradients judge."""
    run, x = scalar_of(name, device, kernels=reference)
    tangent = torch.randn_like(x)
    numeric = (run(x + 1e-6 * tangent) - run(x - 1e-6 * tangent)) / 2e-6
    torch.testing.assert_close(func.jvp(run, (x,), (tangent,))[1], numeric, rtol=1e-6, atol=1e-8)
    if name == "sequence_entropy":  # constant by torch.autograd
        return
    x.requires_grad_()
    assert torch.autograd.gradcheck(run, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, x)
    torch.testing.assert_close(func.hessian(run)(x.detach()), torch.autograd.functional.hessian(run, x.detach()))
