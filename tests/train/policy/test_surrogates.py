"""Surrogates, divergences and penalties in float64 against their formulas, one token at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.kernels.inputs import PRESENT
from exgrpo.train.config.objective import SURROGATES, ObjectiveConfig, overlong_penalty
from exgrpo.train.policy.batch import advantages
from exgrpo.train.policy.ratios import ESTIMATORS, RatioTokens, SurrogateOptions, divergence
from tests.train.batches import Row, make_batch

LENGTHS = (4, 1, 7, 3)
BOUNDS = (0.8, 1.3)


def of_answers(seed=0, *, present=False):
    """Log-probs, old ones and advantages of some answers: [T] each, ratios on both sides of the bounds."""
    rng = np.random.default_rng(seed)
    old = torch.from_numpy(rng.normal(-3, 1, sum(LENGTHS)))
    moved = np.repeat([0.6, -0.6, 0.1, -0.1], LENGTHS) + rng.normal(0, 0.5, len(old))
    log_prob = (old + torch.from_numpy(moved)).requires_grad_()
    advantage = torch.from_numpy(np.repeat([0.75, -0.5, -0.25, 1.5], LENGTHS))
    if present:
        old = torch.full_like(old, PRESENT)
    return log_prob, RatioTokens(log_prob, old, advantage, torch.tensor(LENGTHS))


def written_out(name, log_prob, old, advantage, bounds, dual_clip):
    """The objective of one answer, in numbers; and the tokens whose ratio a bound has taken the place of."""
    low, high = bounds or (0.0, math.inf)
    ratios = [math.exp(a - b) for a, b in zip(log_prob, old, strict=True)]
    if name == "gspo":
        ratios = [math.exp(sum(map(math.log, ratios)) / len(ratios))] * len(ratios)
    total, clipped = 0.0, []
    for ratio, of_token in zip(ratios, log_prob, strict=True):
        bounded = min(max(ratio, low), high)
        value = bounded * advantage * of_token if name == "cispo" else min(ratio * advantage, bounded * advantage)
        if name == "dual_clip" and advantage < 0:
            value = max(value, dual_clip * advantage)
        clipped.append(bounded != ratio if name == "cispo" else not math.isclose(value, ratio * advantage))
        total += value
    return total, clipped


@pytest.mark.parametrize("bounds", [BOUNDS, None])
@pytest.mark.parametrize("name", SURROGATES.names)
def test_a_surrogate_is_its_formula(name, bounds):
    log_prob, tokens = of_answers()
    found = SURROGATES.find(name)(tokens, SurrogateOptions(bounds, 1.4))
    columns = zip(*(v.detach().split(LENGTHS) for v in (log_prob, tokens.old_log_prob, tokens.advantage)), strict=True)
    expected = [written_out(name, a.tolist(), b.tolist(), c[0].item(), bounds, 1.4) for a, b, c in columns]
    assert found.value.sum().item() == pytest.approx(sum(total for total, _ in expected), rel=1e-12)
    assert found.clipped.tolist() == [one for _, clipped in expected for one in clipped]
    if bounds:
        assert 0 < found.clipped.sum() < len(log_prob)


@pytest.mark.parametrize("name", SURROGATES.names)
def test_the_gradient_of_the_policy_that_wrote_the_tokens_is_reinforce(name):
    """Where all ratios are 1, every surrogate has the gradient A of each token's log-prob."""
    log_prob, tokens = of_answers(present=True)
    SURROGATES.find(name)(tokens, SurrogateOptions(BOUNDS, 3.0)).value.sum().backward()
    torch.testing.assert_close(log_prob.grad, tokens.advantage, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", SURROGATES.names)
@given(factor=st.floats(0, 100), seed=st.integers(0, 1000))
def test_surrogates_are_homogeneous_in_the_advantage(name, factor, seed):
    _, tokens = of_answers(seed)
    options = SurrogateOptions(BOUNDS, 1.5)
    more = RatioTokens(tokens.log_prob, tokens.old_log_prob, factor * tokens.advantage, tokens.lengths)
    one, other = (SURROGATES.find(name)(each, options).value.sum() for each in (tokens, more))
    torch.testing.assert_close(factor * one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SURROGATES.names)
def test_a_surrogate_of_no_answers_has_a_gradient(name):
    log_prob = torch.zeros(0, requires_grad=True)
    tokens = RatioTokens(log_prob, torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    value = SURROGATES.find(name)(tokens, SurrogateOptions(BOUNDS, 3.0)).value.sum()
    value.backward()
    assert value == 0
    assert log_prob.grad.shape == (0,)


def test_estimates_of_a_divergence():
    """Over all tokens, each as often as the policy writes it: k1 and k3 are exact, and the gradient of k2 is."""
    logits = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    policy = logits.log_softmax(0)
    reference = (logits.detach() + 0.1 * torch.arange(50.0).sin()).log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    weight = policy.detach().exp()
    means = {name: (weight * divergence(name, policy, reference)).sum() for name in ESTIMATORS}
    for name in ("k1", "k3"):
        assert means[name].item() == pytest.approx(exact.item(), rel=1e-9)
    assert means["k2"].item() == pytest.approx(exact.item(), rel=0.1)
    gradients = {name: torch.autograd.grad(mean, logits, retain_graph=True)[0] for name, mean in means.items()}
    torch.testing.assert_close(gradients["k2"], torch.autograd.grad(exact, logits, retain_graph=True)[0])
    reverse = (reference.exp() * (reference - policy)).sum()
    torch.testing.assert_close(gradients["k3"], torch.autograd.grad(reverse, logits, retain_graph=True)[0])
    assert gradients["k1"].abs().max() < 1e-12
    ratio = (policy - policy.detach()).exp()
    for name in ("k1", "k3"):
        corrected = torch.autograd.grad(
            (weight * ratio * divergence(name, policy, reference)).sum(), logits, retain_graph=True
        )[0]
        torch.testing.assert_close(corrected, gradients["k2"])


def test_a_divergence_is_finite_far_away():
    log_prob = torch.tensor([-500.0, -0.1], requires_grad=True)
    values = divergence("k3", log_prob, torch.tensor([-0.1, -500.0]))
    values.sum().backward()
    assert values.isfinite().all()
    assert log_prob.grad.isfinite().all()


def test_the_penalty_of_length_is_that_of_trl():
    rewards = pytest.importorskip("trl.rewards", reason="trl is not installed", exc_type=ImportError)
    theirs = rewards.get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    options = ObjectiveConfig(overlong_tokens=20)
    lengths = range(1, 101)
    ours = [-overlong_penalty(length, 100, options) for length in lengths]
    assert ours == pytest.approx(theirs([[0] * length for length in lengths]), abs=1e-12)
    smaller = ObjectiveConfig(overlong_tokens=20, overlong_penalty=0.4)
    assert [overlong_penalty(length, 100, smaller) for length in (80, 90, 100)] == pytest.approx([0, 0.2, 0.4])
    assert overlong_penalty(100, 100, ObjectiveConfig()) == 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_leave_one_out_is_the_reward_less_the_mean_of_the_others(rewards):
    batch = make_batch([(0, [Row(reward) for reward in rewards])])
    advantages(batch, leave_one_out=True)
    others = [[*rewards[:i], *rewards[i + 1 :]] for i in range(len(rewards))]
    expected = [r - np.mean(rest) if rest else 0.0 for r, rest in zip(rewards, others, strict=True)]
    assert batch.advantage == pytest.approx(expected, abs=1e-5)
