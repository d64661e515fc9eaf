"""The operators keep the rules of PyTorch's dispatcher: schema, fake and derivative belong together."""

import sys

import pytest
import torch
from torch import library

from exgrpo.kernels import arguments, checks, linear_log_prob, linear_policy_loss, operators
from exgrpo.kernels.inputs import HeadArguments
from exgrpo.kernels.operators.linear_log_prob import backward as linear_log_prob_backward
from exgrpo.kernels.operators.linear_log_prob import forward as linear_log_prob_forward
from exgrpo.kernels.operators.linear_policy_loss import forward as linear_policy_loss_forward
from exgrpo.kernels.operators.linear_policy_loss import scale_gradient
from exgrpo.kernels.operators.schema import flat_head
from exgrpo.kernels.operators.tokens import token_objective

from .support import long_interpreted, make_case, make_tokens

HEADS = {
    "plain": {},
    "allowed_tokens": {"allowed_tokens": (3, 0, 1, 12)},
    "everything": {"bias": True, "softcap": 5.0, "temperature": torch.linspace(0.5, 2, 20, dtype=torch.float64)},
}


def flat(case):
    options = {"temperature": 1.0, "softcap": None, **case.options}
    allowed_tokens = options.pop("allowed_tokens", None)
    given = HeadArguments(case.bias, **options, allowed_tokens=allowed_tokens, ignore_index=-100)
    head = arguments.head(case.hidden, case.weight, case.target, given, None, None, None)
    return flat_head(arguments.keep(head, allowed_tokens))


@long_interpreted
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_log_prob(options, backend, device):
    arguments = flat(make_case(20, 8, 30, torch.float64, device, **options))
    library.opcheck(linear_log_prob_forward, (*arguments, backend, None, None))
    saved = linear_log_prob_forward(*arguments, backend, None, None)[2].detach()
    upstream = torch.randn(20, dtype=torch.float64, device=device)
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    needed = [True, False, arguments[2] is not None]
    library.opcheck(linear_log_prob_backward, (*detached, backend, saved, upstream, None, needed, None))


@long_interpreted
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("frozen", [False, True])
def test_policy_loss(options, frozen, backend, device, monkeypatch):
    """Its backward may scale the gradients in place, since nothing else has them; here the check has them too."""
    module = sys.modules[scale_gradient._init_fn.__module__]  # the package has a function of this name
    monkeypatch.setattr(module, "scale_in_place", lambda *given: scale_gradient(*given[:3]))
    case = make_case(20, 8, 30, torch.float64, device, **options)
    old, advantage, replayed = make_tokens(case)
    if frozen:
        case.hidden.requires_grad_(False)
    needed = [not frozen, True, case.bias is not None]
    terms = (old, advantage, replayed, (0.2, 0.2), 0.1, 0.01, torch.tensor(7.0, device=device))
    library.opcheck(linear_policy_loss_forward, (*flat(case), *terms, needed, backend, None))
    library.opcheck(scale_gradient, (torch.randn(4, 3, device=device), old[0], torch.bfloat16))


@pytest.mark.parametrize("everything", [False, True])
def test_token_objective(everything, backend, device):
    log_prob = torch.randn(20, device=device, requires_grad=True)
    entropy = torch.rand(20, device=device, requires_grad=True) if everything else None
    flags = [torch.rand(20, device=device) < 0.5 if everything else None for _ in range(2)]
    values = torch.randn(2, 20, device=device)
    terms = ((0.2, 0.2), 0.1) if everything else (None, None)
    library.opcheck(token_objective, (log_prob, entropy, *values, *flags, *terms, backend, None))


def test_groups_and_segments(backend, device):
    reward, group = torch.rand(9, device=device), torch.tensor([3, 1, 3, 3, 1, 7, 7, 1, 0], device=device)
    library.opcheck(operators.group_advantage, (reward, group, True, backend))
    bounds = torch.tensor([0, 4, 4, 9], device=device)
    library.opcheck(operators.segment_mean, (reward, reward > 0.3, bounds, backend))


def test_checked(device):
    value = torch.arange(6, device=device)
    library.opcheck(checks.checked, (value, value < 6, "value: expected less than {}", [6]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_with_cuda_graphs(device):
    """The host reads how many tokens take part, which no capture allows; what is around the operators is captured."""
    case = make_case(20, 32, 64, torch.bfloat16, device)
    old, advantage, _ = make_tokens(case)

    def step(hidden, weight):
        result = linear_policy_loss(2 * hidden, weight, case.target, old, advantage)
        log_prob = linear_log_prob(2 * hidden, weight, case.target).log_prob
        return result.loss + log_prob.sin().mean()

    compiled = torch.compile(step, mode="reduce-overhead")
    leaves = (case.hidden, case.weight)
    for _ in range(4):
        found, exact = (torch.autograd.grad(function(*leaves), leaves) for function in (compiled, step))
        torch.testing.assert_close([x.clone() for x in found], list(exact), rtol=0.02, atol=1e-3)
