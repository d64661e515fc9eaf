"""What the theory of arXiv 2510.02245 says about experiential gradients, checked where it can be computed exactly.

A policy over sequences of T tokens from a small vocabulary can be enumerated, and so can all groups of K of them.
With W = prod_t w_t the ratio of a whole sequence, one row o* from a past policy and K - 1 fresh ones:

    E[W g] = E_theta[g]                                     for any g of the whole group
    Var[X] <= (2 / K^2) (E[W^2 U*^2] + (K - 1)^2 E[U^2])    for the experiential gradient
                                                            X = (W A* s* + sum of A_i s_i) / K

s is the score (gradient of log pi_theta), A the advantage, U = |A s|, and Var the expected squared distance from the
mean. The method itself weighs tokens by their own ratios, shapes these by f(w) = w / (w + beta) and chooses o*
instead of drawing it: it is biased and bounded. The theorem is about the corrected estimator only.
"""

import itertools
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from exgrpo.kernels import group_advantage, importance_ratio, policy_loss, shape_ratio
from exgrpo.train.common.step_batch import ENGINE
from exgrpo.train.config.objective import CorrectionConfig
from exgrpo.train.policy.correction import corrected
from tests.train.batches import Row, make_batch

VOCABULARY = 3
BETA = 0.1
DRIFTS = [0.0, 0.3, 1.5]
"""Standard deviation of the difference between the past policy's logits and the current one's."""


def softmax_policy(logits: Tensor, sequences: Tensor) -> Tensor:
    """[N, T] log-probs of the tokens of `sequences`; row 0 of `logits` opens a sequence, row 1 + v follows token v."""
    before = torch.cat([torch.zeros_like(sequences[:, :1]), sequences[:, :-1] + 1], dim=1)
    return logits.log_softmax(-1)[before, sequences]


@dataclass(frozen=True)
class World:
    """All sequences, rewarded at random, under a current and a past policy. N sequences, P parameters.

    log_prob, past_log_prob: [N, T]; score: [N, P]; reward: [N]; groups: [N^K, K] indices of sequences, o* first.
    """

    logits: Tensor
    sequences: Tensor
    log_prob: Tensor
    past_log_prob: Tensor
    score: Tensor
    reward: Tensor
    groups: Tensor

    @property
    def samples(self) -> int:
        return self.groups.shape[1]

    @property
    def weight(self) -> Tensor:
        """[N] W, the ratio of each whole sequence."""
        return importance_ratio(self.log_prob, self.past_log_prob).prod(1)

    def chances(self, *, replayed: bool) -> Tensor:
        """[N^K] probability of each group; `replayed`: its first row comes from the past policy."""
        current, past = self.log_prob.sum(1).exp(), self.past_log_prob.sum(1).exp()
        return (past if replayed else current)[self.groups[:, 0]] * current[self.groups[:, 1:]].prod(1)

    def advantages(self, groups: Tensor, *, scale_by_std: bool = False) -> Tensor:
        """[G, K] advantages of the rows of `groups`."""
        index = torch.arange(len(groups)).repeat_interleave(self.samples)
        return group_advantage(self.reward[groups].reshape(-1), index, scale_by_std=scale_by_std).view_as(groups)

    def terms(self, groups: Tensor, *, scale_by_std: bool = False) -> Tensor:
        """[G, K, P] A_i s_i of the rows of `groups`."""
        return self.advantages(groups, scale_by_std=scale_by_std)[..., None] * self.score[groups]

    def experiential(self, groups: Tensor, *, scale_by_std: bool = False) -> Tensor:
        """[G, P] the corrected gradient X of each group, its first row replayed."""
        terms = self.terms(groups, scale_by_std=scale_by_std)
        return (self.weight[groups[:, :1]] * terms[:, 0] + terms[:, 1:].sum(1)) / self.samples


def make(drift: float, *, tokens: int = 2, samples: int = 3, seed: int = 0) -> World:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCABULARY + 1, VOCABULARY, dtype=torch.float64, generator=rng)
    past = logits + drift * torch.randn(logits.shape, dtype=torch.float64, generator=rng)
    sequences = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=tokens)))
    count = len(sequences)
    score = torch.func.jacrev(lambda z: softmax_policy(z, sequences).sum(1))(logits).reshape(count, -1)
    return World(
        logits=logits,
        sequences=sequences,
        log_prob=softmax_policy(logits, sequences),
        past_log_prob=softmax_policy(past, sequences),
        score=score,
        reward=(torch.randperm(count, generator=rng) < count / 2).double(),
        groups=torch.tensor(list(itertools.product(range(count), repeat=samples))),
    )


def mean(values: Tensor, chances: Tensor) -> Tensor:
    """Expectation over groups of [G] or [G, P] values."""
    return torch.tensordot(chances, values, dims=1)


def assert_same(ours: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("drift", DRIFTS)
@pytest.mark.parametrize(("tokens", "samples"), [(1, 4), (2, 3), (3, 2)])
def test_any_function_of_the_group_is_estimated_without_bias(drift, tokens, samples):
    world = make(drift, tokens=tokens, samples=samples)
    weight = world.weight[world.groups[:, 0]]
    past, current = world.chances(replayed=True), world.chances(replayed=False)
    assert past.sum().item() == pytest.approx(1)
    assert mean(weight, past).item() == pytest.approx(1)
    rng = torch.Generator().manual_seed(1)
    anything = torch.randn(len(world.groups), 5, dtype=torch.float64, generator=rng)
    # With scale_by_std the advantage is no longer linear in the rewards: g may still be it.
    for g in (anything, world.terms(world.groups)[:, 0], world.terms(world.groups, scale_by_std=True)[:, 0]):
        assert_same(mean(weight[:, None] * g, past), mean(g, current))
        if drift:
            assert (mean(g, past) - mean(g, current)).norm() > 1e-3, "without W it is biased"


@pytest.mark.parametrize("drift", DRIFTS)
def test_the_experiential_gradient_is_the_policy_gradient(drift):
    """Fresh rows share a mean with o*, but are independent of it: (K - 1) / K of the gradient of E[r] remains."""
    world = make(drift)
    exact = torch.func.grad(lambda z: softmax_policy(z, world.sequences).sum(1).exp() @ world.reward)(world.logits)
    exact = exact.reshape(-1) * (world.samples - 1) / world.samples
    assert_same(mean(world.terms(world.groups).mean(1), world.chances(replayed=False)), exact)
    assert_same(mean(world.experiential(world.groups), world.chances(replayed=True)), exact)


@pytest.mark.parametrize("scale_by_std", [False, True])
@pytest.mark.parametrize("drift", DRIFTS)
@pytest.mark.parametrize(("tokens", "samples"), [(1, 4), (2, 3), (3, 2)])
def test_its_variance_is_bounded(drift, tokens, samples, scale_by_std):
    world = make(drift, tokens=tokens, samples=samples)
    chances = world.chances(replayed=True)
    x = world.experiential(world.groups, scale_by_std=scale_by_std)
    variance = mean((x - mean(x, chances)).square().sum(-1), chances)
    squares = world.terms(world.groups, scale_by_std=scale_by_std).square().sum(-1)
    replayed = mean(world.weight[world.groups[:, 0]] ** 2 * squares[:, 0], chances)
    fresh = mean(squares[:, 1:].mean(1), chances)
    bound = 2 / samples**2 * (replayed + (samples - 1) ** 2 * fresh)
    assert 0 < variance <= bound


def loss_gradients(world: World, beta: float | None) -> Tensor:
    """[N^K, P] gradients by which the project's own loss ascends, one for each group with its first row replayed."""
    tokens = world.sequences.shape[1]
    log_prob = world.log_prob[world.groups].detach().requires_grad_()  # [G, K, T]
    old = world.log_prob[world.groups].detach().clone()
    old[:, 0] = world.past_log_prob[world.groups[:, 0]]
    replayed = torch.zeros_like(log_prob, dtype=torch.bool)
    replayed[:, 0] = True
    advantage = world.advantages(world.groups)[..., None].expand(-1, -1, tokens)
    result = policy_loss(log_prob, old, advantage, replayed=replayed, clip=None, beta=beta, normalizer=world.samples)
    (of_tokens,) = torch.autograd.grad(-result.loss, log_prob)
    jacobian = torch.func.jacrev(lambda z: softmax_policy(z, world.sequences))(world.logits)  # [N, T, V + 1, V]
    return torch.einsum("gkt,gktp->gp", of_tokens, jacobian.flatten(2)[world.groups])


def test_the_loss_without_shaping_is_the_corrected_estimator_where_a_response_is_one_token():
    world = make(1.0, tokens=1, samples=4)
    assert_same(loss_gradients(world, beta=None), world.experiential(world.groups))


def test_per_token_ratios_of_longer_responses_are_biased():
    world = make(1.0)
    exact = mean(world.experiential(world.groups), world.chances(replayed=True))
    assert (mean(loss_gradients(world, beta=None), world.chances(replayed=True)) - exact).norm() > 1e-3


@pytest.mark.parametrize("drift", [0.0, 1.0, 8.0])
def test_the_shaped_estimator_is_biased_but_bounded(drift):
    """However far the policies are apart, o* moves no token's log-prob by more than a quarter of its advantage."""
    world = make(drift, tokens=1, samples=4)
    chances = world.chances(replayed=True)
    shaped = loss_gradients(world, beta=BETA)
    exact = mean(world.experiential(world.groups), chances)
    assert (mean(shaped, chances) - exact).norm() > 1e-3, "even where the policies agree: f(1 - f) is not 1"
    terms = world.terms(world.groups)
    of_replayed = world.samples * shaped - terms[:, 1:].sum(1)
    assert (of_replayed.norm(dim=-1) <= terms[:, 0].norm(dim=-1) / 4 + 1e-12).all()


def test_the_coefficient_of_a_replayed_token():
    """A f (1 - f): 0.0826 A at w = 1, at most A / 4, reached at w = beta."""
    advantage = 0.7
    at_one, at_beta = coefficient(torch.tensor([1.0, BETA], dtype=torch.float64).log(), advantage)
    assert at_one.item() == pytest.approx(0.0826 * advantage, rel=1e-3)
    assert at_beta.item() == pytest.approx(0.25 * advantage)
    log_ratio = torch.linspace(-60, 60, 2401, dtype=torch.float64)
    coefficients = coefficient(log_ratio, advantage)
    assert (coefficients > 0).all()
    assert (coefficients <= advantage / 4).all()
    moderate = log_ratio.abs() < 15  # beyond it 1 - f loses its digits
    f = shape_ratio(importance_ratio(log_ratio, torch.zeros_like(log_ratio)), BETA)
    torch.testing.assert_close(coefficients[moderate], (advantage * f * (1 - f))[moderate], rtol=1e-8, atol=0)
    assert (coefficients.argmax() - (log_ratio - torch.tensor(BETA).log()).abs().argmin()).abs() <= 1


def coefficient(log_ratio: Tensor, advantage: float) -> Tensor:
    """Derivative of the objective of replayed tokens with respect to their log-probs."""
    log_prob = log_ratio.clone().requires_grad_()
    every = torch.ones_like(log_ratio)
    result = policy_loss(
        log_prob, 0 * every, advantage * every, replayed=every.bool(), clip=None, beta=BETA, normalizer=1
    )
    return torch.autograd.grad(-result.loss, log_prob)[0]


STALE, NEW = np.array([0.7, -0.4, 0.1]), np.array([-0.2, 0.5, 0.3])
"""Logits of the first token under the policy that wrote it and under the present one."""


@pytest.mark.parametrize("independent", [True, False])
def test_ratios_by_token_give_the_policy_gradient_and_plain_reuse_does_not(independent):
    """All answers of two tokens, the first one by an earlier policy; the second one's logits may depend on the first.

    An expectation over all answers has no noise. With ratios by token the gradient at the first token is exact, and
    all of it if the rewards of the tokens add up and the second one is independent; ratios of answers are always exact.
    """
    rng = np.random.default_rng(0)
    second = np.tile(rng.normal(size=3), (3, 1)) if independent else rng.normal(size=(3, 3))
    reward = np.add.outer(rng.normal(size=3), rng.normal(size=3)) if independent else rng.normal(size=(3, 3))
    log_softmax = lambda logits: logits - np.log(np.exp(logits).sum(-1, keepdims=True))  # noqa: E731
    old, new, after = log_softmax(STALE), log_softmax(NEW), log_softmax(second)
    answers = list(product(range(3), range(3)))
    rows = [Row(0.0, (a, b), (old[a], after[a, b]), old_log_probs_from=ENGINE) for a, b in answers]
    batch = make_batch([(0, rows)])
    batch.fill(
        log_prob=np.concatenate([[new[a], after[a, b]] for a, b in answers]),
        advantage=[reward[a, b] for a, b in answers],
    )

    def gradient(first, factor):
        """Of the expected reward, by the logits of the first token, and of the second one behind each first one."""
        found = np.zeros((4, 3))
        for (a, b), (of_first, of_second) in zip(answers, factor.reshape(-1, 2), strict=True):
            weight = np.exp(first[a] + after[a, b]) * reward[a, b]
            found[0] += weight * of_first * (np.eye(3)[a] - np.exp(new))
            found[1 + (0 if independent else a)] += weight * of_second * (np.eye(3)[b] - np.exp(after[a]))
        return found

    exact = gradient(new, np.ones(18))
    weights = {
        name: corrected(batch, CorrectionConfig(behaviour="engine", correction=name, correction_bounds=(0, 100))).factor
        for name in ("tis", "sequence_tis")
    }
    by_token, by_answer, plain = (gradient(old, factor) for factor in (*weights.values(), np.ones(18)))
    np.testing.assert_allclose(by_token[0], exact[0], atol=1e-6)  # factors are fp32
    np.testing.assert_allclose(by_answer, exact, atol=1e-6)
    assert np.allclose(by_token, exact, atol=1e-6) == independent
    assert np.abs(plain[0] - exact[0]).max() > 0.02
