"""The oracle against PyTorch's own functions and closed forms, so that it shares no error with what it judges."""

import math

import pytest
import torch
from torch.distributions import Categorical

from exgrpo.kernels import reference

from .support import make_case, make_tokens


def test_log_prob_and_entropy_agree_with_torch():
    case = make_case((6, 9), 20, 31, torch.float64, "cpu", bias=True)
    log_prob, entropy = case.log_prob(reference.linear_log_prob, temperature=0.7)
    logits = (case.hidden @ case.weight.T + case.bias) / 0.7
    loss = torch.nn.functional.cross_entropy(logits.view(-1, 31), case.target.view(-1), reduction="none")
    torch.testing.assert_close(log_prob.view(-1), -loss)
    torch.testing.assert_close(case.gradients(-log_prob.sum()), case.gradients(loss.sum()))
    kept = case.target != -100
    torch.testing.assert_close(entropy[kept], Categorical(logits=logits[kept]).entropy())
    assert not entropy[~kept].any()


def test_softcap_comes_before_temperature():
    logit = torch.tensor([[4.0, 0.0]], dtype=torch.float64)
    result = reference.linear_log_prob(
        torch.ones(1, 1, dtype=torch.float64), logit.T, torch.tensor([0]), softcap=2.0, temperature=0.5
    )
    capped = 2 * math.tanh(4 / 2) / 0.5
    assert result.log_prob.item() == pytest.approx(-math.log1p(math.exp(-capped)))


@pytest.mark.parametrize(
    ("ratio", "advantage", "replayed", "objective", "slope", "clipped"),
    [
        (1.0, 2.0, False, 2.0, 2.0, 0),
        (1.5, 2.0, False, 2.4, 0.0, 1),
        (0.5, 2.0, False, 1.0, 1.0, 0),
        (1.5, -2.0, False, -3.0, -3.0, 0),
        (0.5, -2.0, False, -1.6, 0.0, 1),
        (1.5, 0.0, False, 0.0, 0.0, 0),
        (1.0, 2.0, True, 2 / 1.1, 2 * 0.1 / 1.1**2, 0),
        (0.1, -2.0, True, -1.0, -0.5, 0),
        (5.0, 2.0, True, 10 / 5.1, 2 * 0.5 / 5.1**2, 0),
    ],
)
def test_objective_by_hand(ratio, advantage, replayed, objective, slope, clipped):
    log_prob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    result = reference.policy_loss(
        log_prob, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage]), replayed=torch.tensor([replayed])
    )
    result.loss.backward()
    assert -result.loss.item() == pytest.approx(objective)
    assert -log_prob.grad.item() == pytest.approx(slope)
    assert result.ratio.item() == pytest.approx(ratio)
    assert result.clipped.item() == clipped


def test_normalizer_and_entropy_bonus():
    log_prob = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    entropy = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    result = reference.policy_loss(
        log_prob, log_prob, torch.ones(3), entropy=entropy, entropy_coef=0.1, mask=torch.tensor([True, False, True])
    )
    assert result.loss.item() == pytest.approx(-(2 + 0.1 * 2.5) / 2)
    result = reference.policy_loss(log_prob, log_prob, torch.ones(3), normalizer=12)
    assert result.loss.item() == pytest.approx(-3 / 12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_policy_loss_of_sixteen_bits_is_computed_in_float32(dtype, device):
    """Ratios of tokens whose log-probabilities are exact in 16 bits are exact to float32's rounding."""
    log_prob = (torch.linspace(-8, 0, 33, device=device)).to(dtype)
    old = log_prob + torch.tensor([0.25, -0.125, 0.0], dtype=dtype, device=device).repeat(11)
    advantage = torch.linspace(-1, 1, 33, device=device)
    found = reference.policy_loss(log_prob, old, advantage, normalizer=torch.tensor(7, device=device))
    exact = reference.policy_loss(log_prob.double(), old.double(), advantage.double(), normalizer=7)
    assert all(values.dtype == torch.float32 for values in found)
    torch.testing.assert_close([x.double() for x in found], list(exact), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(reference.importance_ratio(log_prob, old).double(), exact.ratio, rtol=1e-6, atol=0)


def test_a_temperature_and_a_normalizer_are_constant(device):
    """By this backend too."""
    case = make_case(6, 4, 9, torch.float64, device)
    old, advantage, _ = make_tokens(case)
    temperature = torch.rand(6, dtype=torch.float64, device=device).add(0.5).requires_grad_()
    normalizer = torch.tensor(3.0, dtype=torch.float64, requires_grad=True, device=device)
    more = {"temperature": temperature, "normalizer": normalizer, "backend": "reference"}
    loss = case.policy_loss(old, advantage, **more).loss
    assert torch.autograd.grad(loss, (temperature, normalizer), allow_unused=True) == (None, None)
