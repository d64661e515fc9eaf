"""The oracle against PyTorch's own functions and closed forms, so that it shares no error with what it judges."""

import math

import pytest
import torch
from torch.distributions import Categorical

from exgrpo.kernels import reference

from .support import make_case


def test_log_prob_and_entropy_agree_with_torch():
    case = make_case((6, 9), 20, 31, torch.float64, "cpu", bias=True)
    log_prob, entropy = case.log_prob(reference.linear_log_prob, temperature=0.7)
    logits = (case.hidden @ case.weight.T + case.bias) / 0.7
    loss = torch.nn.functional.cross_entropy(logits.view(-1, 31), case.target.view(-1), reduction="none")
    torch.testing.assert_close(log_prob.view(-1), -loss)
    kept = case.target != -100
    torch.testing.assert_close(entropy[kept], Categorical(logits=logits[kept]).entropy())
    assert not entropy[~kept].any()


def test_gradient_agrees_with_cross_entropy():
    case = make_case(23, 12, 17, torch.float64, "cpu")
    ours = case.gradients(-case.log_prob(reference.linear_log_prob).log_prob.sum())
    logits = case.hidden @ case.weight.T
    theirs = case.gradients(torch.nn.functional.cross_entropy(logits, case.target, reduction="sum"))
    torch.testing.assert_close(ours, theirs)


def test_softcap_comes_before_temperature():
    logit = torch.tensor([[4.0, 0.0]], dtype=torch.float64)
    result = reference.linear_log_prob(
        torch.ones(1, 1, dtype=torch.float64), logit.T, torch.tensor([0]), softcap=2.0, temperature=0.5
    )
    capped = 2 * math.tanh(4 / 2) / 0.5
    assert result.log_prob.item() == pytest.approx(-math.log1p(math.exp(-capped)))


def test_two_words_in_closed_form():
    for gap in (0.0, 0.3, 5.0):
        weight = torch.tensor([[gap], [0.0]], dtype=torch.float64)
        result = reference.linear_log_prob(torch.ones(1, 1, dtype=torch.float64), weight, torch.tensor([0]))
        p = 1 / (1 + math.exp(-gap))
        assert result.log_prob.item() == pytest.approx(math.log(p))
        assert result.entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))


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


def test_replayed_coefficient_of_the_paper():
    """At ratio 1 a replayed token has 0.0826 of its advantage, at ratio beta the most, a quarter."""
    for ratio, expected in ((1.0, 0.0826), (0.1, 0.25)):
        log_prob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
        replayed = torch.tensor([True])
        reference.policy_loss(log_prob, torch.zeros_like(log_prob), torch.ones(1), replayed=replayed).loss.backward()
        assert -log_prob.grad.item() == pytest.approx(expected, abs=5e-5)


def test_normalizer_and_entropy_bonus():
    log_prob = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    entropy = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    result = reference.policy_loss(
        log_prob, log_prob, torch.ones(3), entropy=entropy, entropy_coef=0.1, mask=torch.tensor([True, False, True])
    )
    assert result.loss.item() == pytest.approx(-(2 + 0.1 * 2.5) / 2)
    result = reference.policy_loss(log_prob, log_prob, torch.ones(3), normalizer=12)
    assert result.loss.item() == pytest.approx(-3 / 12)
