"""Surrogates, divergences and penalties against their formulas; advantages, mini-batches and the tensors of passes."""

import dataclasses
import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.kernels import group_advantage
from exgrpo.kernels.inputs import PRESENT
from exgrpo.train.common.functions import Needs
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.config.objective import SURROGATES, MethodOptions, ObjectiveConfig, overlong_penalty
from exgrpo.train.config.replay import Baseline
from exgrpo.train.policy.batch import IGNORED, MiniBatch, build_minibatches
from exgrpo.train.policy.layout import Padded, schedule
from exgrpo.train.policy.ratios import ESTIMATORS, RatioTokens
from exgrpo.train.policy.update import mismatch_metrics
from exgrpo.train.replay.groups import fill_advantages, group_advantages
from tests.train.batches import Row, make_batch

LENGTHS = (4, 1, 7, 3)
BOUNDS = (0.8, 1.3)
WEIGHTS = (1.0, 0.5, 2.0, 0.25)
"""Of the answers, where the objective is not homogeneous in the advantage."""
OPTIONS = MethodOptions(objective=ObjectiveConfig(dual_clip=1.4, beta2=0.3))
ALL_ROWS = [name for name in SURROGATES.names if Needs.of(SURROGATES.find(name)).all_rows]
HOMOGENEOUS = [name for name in SURROGATES.names if name not in ALL_ROWS]


def of_answers(seed=0, *, present=False, bounds=BOUNDS):
    """Log-probs, old ones and advantages of some answers: [T] each, ratios on both sides of the bounds."""
    rng = np.random.default_rng(seed)
    old = torch.from_numpy(rng.normal(-1.5, 1, sum(LENGTHS)))
    moved = np.repeat([0.6, -0.6, 0.1, -0.1], LENGTHS) + rng.normal(0, 0.5, len(old))
    log_prob = (old + torch.from_numpy(moved)).requires_grad_()
    advantage = torch.from_numpy(np.repeat([0.75, -0.5, -0.25, 1.5], LENGTHS))
    if present:
        old = torch.full_like(old, PRESENT)
    weight = torch.from_numpy(np.repeat(WEIGHTS, LENGTHS))
    return log_prob, RatioTokens(log_prob, old, advantage, torch.tensor(LENGTHS), weight, bounds)


def written_out(name, log_prob, old, advantage, bounds, dual_clip):
    """The objective of one answer, in numbers; and the tokens whose ratio a bound has taken the place of."""
    low, high = bounds or (0.0, math.inf)
    moved, beta2, nothing = sum(log_prob) - sum(old), OPTIONS.objective.beta2, [False] * len(old)
    match name:
        case "oapl":
            return -((beta2 * moved - advantage) ** 2), nothing
        case "coupled":
            return -((advantage / beta2 - moved) ** 2), nothing
        case "topr":
            weight = 1.0 if advantage >= 0 else min(math.exp(moved), 1.0)
            return weight * advantage * sum(log_prob), [advantage < 0 and moved > 0] * len(old)
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
    log_prob, tokens = of_answers(bounds=bounds)
    found = SURROGATES.find(name)(tokens, OPTIONS)
    columns = zip(*(v.detach().split(LENGTHS) for v in (log_prob, tokens.old_log_prob, tokens.advantage)), strict=True)
    expected = [written_out(name, a.tolist(), b.tolist(), c[0].item(), bounds, 1.4) for a, b, c in columns]
    weights = WEIGHTS if name in ALL_ROWS else [1] * len(LENGTHS)
    total = sum(weight * total for weight, (total, _) in zip(weights, expected, strict=True))
    assert found.value.sum().item() == pytest.approx(total, rel=1e-12)
    assert found.clipped.tolist() == [one for _, clipped in expected for one in clipped]
    if bounds and name not in ("oapl", "coupled"):
        assert 0 < found.clipped.sum() < len(log_prob)


@pytest.mark.parametrize("name", HOMOGENEOUS)
def test_the_gradient_of_the_policy_that_wrote_the_tokens_is_reinforce(name):
    """Where all ratios are 1, every homogeneous surrogate has the gradient A of each token's log-prob."""
    log_prob, tokens = of_answers(present=True)
    SURROGATES.find(name)(tokens, MethodOptions()).value.sum().backward()
    torch.testing.assert_close(log_prob.grad, tokens.advantage, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["oapl", "coupled"])
def test_the_gradient_of_a_regression_is_proportional_to_the_advantage_less_the_log_ratio(name):
    """(2 b2 / N) (A - b2 S) of each token of OAPL; also where A = 0. coupled: 1 / b2^2 times it."""
    log_prob, tokens = of_answers()
    tokens = dataclasses.replace(tokens, advantage=tokens.advantage * (tokens.advantage != 1.5))
    SURROGATES.find(name)(tokens, OPTIONS).value.sum().backward()
    moved = tokens.over_tokens(tokens.sums(tokens.log_ratio.detach()))
    beta2 = OPTIONS.objective.beta2
    scale = {"oapl": 1.0, "coupled": 1 / beta2**2}[name]
    expected = 2 * beta2 * scale * tokens.weight * (tokens.advantage - beta2 * moved)
    torch.testing.assert_close(log_prob.grad, expected, rtol=1e-12, atol=0)
    assert (log_prob.grad != 0).all()


@pytest.mark.parametrize("name", SURROGATES.names)
def test_a_surrogate_of_no_answers_has_a_gradient(name):
    log_prob = torch.zeros(0, requires_grad=True)
    none = torch.zeros(0)
    tokens = RatioTokens(log_prob, none, none, torch.zeros(0, dtype=torch.int64), none, BOUNDS)
    value = SURROGATES.find(name)(tokens, MethodOptions()).value.sum()
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
    means = {name: (weight * ESTIMATORS[name](reference - policy)).sum() for name in ESTIMATORS}
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
            (weight * ratio * ESTIMATORS[name](reference - policy)).sum(), logits, retain_graph=True
        )[0]
        torch.testing.assert_close(corrected, gradients["k2"])


def test_a_divergence_is_finite_far_away():
    log_prob = torch.tensor([-500.0, -0.1], requires_grad=True)
    values = ESTIMATORS["k3"](torch.tensor([-0.1, -500.0]) - log_prob)
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
    fill_advantages(batch, ObjectiveConfig(baseline="leave_one_out"))
    others = [[*rewards[:i], *rewards[i + 1 :]] for i in range(len(rewards))]
    expected = [r - np.mean(rest) if rest else 0.0 for r, rest in zip(rewards, others, strict=True)]
    assert batch.advantage == pytest.approx(expected, abs=1e-5)


@given(st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=5), min_size=1, max_size=3), st.floats(1e-3, 1e3))
def test_the_value_of_regressions_is_between_the_mean_and_the_best_reward(rewards, beta1):
    batch = make_batch([(question, [Row(reward) for reward in of_group]) for question, of_group in enumerate(rewards)])
    fill_advantages(batch, ObjectiveConfig(baseline="log_mean_exp", beta1=beta1))
    for group, of_group in enumerate(map(np.array, rewards)):
        value = of_group - batch.advantage[batch.group == group]
        best = of_group.max()  # taken out, so that the exponentials are finite
        expected = best + beta1 * np.log(np.mean(np.exp((of_group - best) / beta1)))
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12 * max(1, beta1))


@pytest.mark.parametrize(("beta2", "baseline"), [(0.05, "mean"), (1.0, "log_mean_exp")])
def test_coupled_answers_have_the_gradient_of_their_groups_variance(beta2, baseline):
    """Of u = reward / beta2 - S over each whole group; the trainer has taken the means from log-probs before."""
    rng = np.random.default_rng(0)
    groups = [[Row(float(rng.integers(2)), range(n), rng.normal(-2, 1, n)) for n in (3, 1, 4)] for _ in range(2)]
    batch = make_batch(list(enumerate(groups)), loss_mask=np.ones(6, bool))
    objective = ObjectiveConfig(surrogate="coupled", normalize="answer", entropy_coef=0, beta2=beta2, baseline=baseline)
    fill_advantages(batch, objective)
    (minibatch,) = build_minibatches(batch, 1, rng, objective, 9, all_rows=True)
    moved = rng.normal(0, 0.5, len(batch.token)).astype(np.float32)
    batch.fill(log_prob=batch.old_log_prob)
    minibatch.refer_to(batch)
    rows = minibatch.batch
    log_prob = torch.from_numpy((rows.ratio_log_prob + moved).astype(np.float64)).requires_grad_()
    old, lengths = torch.from_numpy(rows.ratio_log_prob.astype(np.float64)), torch.from_numpy(rows.length)
    minibatch.couple(log_prob.detach().numpy(), beta2, np.ones(len(rows), bool))
    advantage = torch.from_numpy(rows.by_token(rows.advantage))
    tokens = RatioTokens(log_prob, old, advantage, lengths, torch.ones_like(old))
    found = SURROGATES.find("coupled")(tokens, MethodOptions(objective=objective)).value.sum() / minibatch.normalizer
    u = torch.from_numpy(rows.reward) / beta2 - tokens.sums(log_prob - old)
    of_groups = [u[torch.from_numpy(rows.group == group)] for group in range(2)]
    expected = -sum(((one - one.mean()) ** 2).sum() for one in of_groups) / len(u)
    gradients = [torch.autograd.grad(value, log_prob, retain_graph=True)[0] for value in (found, expected)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)  # advantages of the mean are in fp32
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5 / beta2)


CPU = torch.device("cpu")


def row(length: int, reward: float, **more) -> Row:
    return Row(reward, range(10, 10 + length), -np.arange(1.0, length + 1), **more)


def with_advantages(*groups: list[Row], **columns) -> StepBatch:
    rows = sum(map(len, groups))
    batch = make_batch(list(enumerate(groups)), **{"loss_mask": np.ones(rows, bool), **columns})
    batch.fill(ratio_log_prob=batch.old_log_prob)
    fill_advantages(batch, ObjectiveConfig())
    return batch


def whole(batch: StepBatch, objective: ObjectiveConfig) -> MiniBatch:
    (minibatch,) = build_minibatches(batch, 1, np.random.default_rng(0), objective, 50)
    return minibatch


def test_mixed_group_shares_one_mean():
    # m of the 7 fresh ones right: mean (m+1)/8, so (7-m)/8 for the right ones and -(m+1)/8 for the wrong ones.
    for right in range(8):
        fresh = [row(2, float(i < right)) for i in range(7)]
        batch = with_advantages([*fresh, row(2, 1.0, replayed=True)])
        expected = [(7 - right) / 8] * right + [-(right + 1) / 8] * (7 - right) + [(7 - right) / 8]
        np.testing.assert_allclose(batch.advantage, expected, atol=1e-7)


@pytest.mark.parametrize(("normalize", "normalizer"), [("constant", 4 * 50.0), ("token", 14.0), ("sequence", 4.0)])
def test_normalizer_counts_the_whole_minibatch(normalize, normalizer):
    objective = ObjectiveConfig(normalize=normalize, entropy_coef=0.0)
    batch = with_advantages([row(2, 1.0), row(4, 0.0)], [row(3, 1.0), row(5, 1.0, replayed=True)])
    minibatch = whole(batch, objective)
    # The second group's advantages are zero: its rows cannot carry a gradient, yet they count.
    assert minibatch.normalizer == normalizer
    assert (minibatch.tokens, minibatch.fresh_tokens) == (14, 9)
    assert sorted(minibatch.rows) == [0, 1]
    np.testing.assert_array_equal(minibatch.batch.length, batch.length[minibatch.rows])
    share = {2: 0.5, 4: -0.5} if normalize != "sequence" else {2: 0.25, 4: -0.125}
    assert dict(zip(minibatch.batch.length, minibatch.batch.advantage, strict=True)) == share
    np.testing.assert_array_equal(batch.advantage, [0.5, -0.5, 0, 0])


def test_with_an_entropy_bonus_every_row_stays():
    minibatch = whole(with_advantages([row(3, 1.0), row(5, 1.0)]), ObjectiveConfig(entropy_coef=0.1))
    assert len(minibatch.rows) == 2
    assert not minibatch.has_signal


@given(st.integers(1, 9), st.integers(1, 12))
def test_minibatches_partition_the_groups(count, groups):
    batch = with_advantages(*([row(1, 1.0), row(2, 0.0)] for _ in range(groups + 1)))
    batch.fill(trained=np.arange(1, groups + 1)[::-1])
    parts = build_minibatches(batch, count, np.random.default_rng(0), ObjectiveConfig(), 5)
    sizes = [len(part.rows) for part in parts]
    assert len(parts) == min(count, groups)
    assert max(sizes) - min(sizes) <= 2
    for part in parts:
        np.testing.assert_array_equal(part.rows[::2] + 1, part.rows[1::2])
    assert sorted(i for part in parts for i in part.rows) == list(range(2, 2 * groups + 2))


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(100, 400), st.integers(1, 5))
def test_schedule_covers_every_row_once_within_the_budget(lengths, budget, ranks):
    plan = schedule(lengths, budget, ranks)
    assert sorted(i for of_rank in plan for batch in of_rank for i in batch) == list(range(len(lengths)))
    assert len(plan) == ranks
    assert len({len(of_rank) for of_rank in plan}) == 1
    for of_rank in plan:
        for batch in of_rank:
            assert len(batch) * max((lengths[i] for i in batch), default=0) <= budget
    loads = [sum(lengths[i] for batch in of_rank for i in batch) for of_rank in plan]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_factors_of_the_step_multiply_the_advantages_of_fresh_tokens():
    batch = with_advantages([row(2, 1.0), row(3, 0.0), row(1, 1.0, replayed=True)])
    minibatch = whole(batch, ObjectiveConfig())
    assert not minibatch.batch.has("factor")
    batch.put(np.array([0, 1]), log_prob=np.arange(5.0), factor=np.array([1, 2, 0, 1, 0.5]))
    minibatch.refer_to(batch)
    np.testing.assert_array_equal(minibatch.batch.ratio_log_prob, [0, 1, 2, 3, 4, -1])
    np.testing.assert_allclose(minibatch.batch.advantage, [1 / 3, -2 / 3, 1 / 3], atol=1e-7)
    tensors = Padded().rows(minibatch.batch, CPU)
    expected = np.array([1, 2, 0, 1, 0.5, 1]) * np.repeat(minibatch.batch.advantage, [2, 3, 1])
    torch.testing.assert_close(tensors.advantage[tensors.target != IGNORED], torch.from_numpy(expected).float())
    assert tensors.active == 5


def test_rows_that_are_not_learnt_count_and_carry_no_gradient():
    objective = ObjectiveConfig(normalize="token", entropy_coef=0.1)
    batch = with_advantages(*([row(2, 1.0), row(4, 0.0)] for _ in range(2)), loss_mask=[False, False, True, True])
    minibatch = whole(batch, objective)
    assert (minibatch.normalizer, minibatch.tokens) == (12, 12)
    assert minibatch.rows.tolist() == [2, 3]


def test_numbers_of_a_known_difference():
    trainer = np.array([-1.0, -2.0, -0.5], np.float32)
    engine = np.array([-1.0, -1.5, -1.5], np.float32)
    numbers = mismatch_metrics(trainer, engine)
    w = np.exp([0, -0.5, 1.0])
    assert numbers["mean"] == pytest.approx(0.5)
    assert numbers["p99"] == numbers["max"] == 1.0
    assert numbers["kl"] == pytest.approx(-0.5 / 3)
    assert numbers["kl_k3"] == pytest.approx((w - 1 - np.array([0, -0.5, 1.0])).mean())
    assert numbers["ess"] == pytest.approx(w.sum() ** 2 / (3 * (w**2).sum()))


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-2, 2, width=32)), min_size=1, max_size=12), st.booleans())
def test_advantages_are_those_of_the_kernel_to_the_bit(rows, scale_by_std):
    group, reward = (np.array(column) for column in zip(*rows, strict=True))
    options = ObjectiveConfig(scale_by_std=scale_by_std)
    found = group_advantages(reward, group, np.ones(len(rows)), options, np.float32)
    reward32, groups = torch.from_numpy(reward.astype(np.float32)), torch.from_numpy(group)
    np.testing.assert_array_equal(found, group_advantage(reward32, groups, scale_by_std=scale_by_std).numpy())


@given(st.lists(st.integers(0, 1), min_size=2, max_size=8), st.sampled_from(get_args(Baseline)), st.booleans())
def test_answers_of_weight_n_count_as_n_answers(rewards, baseline, scale_by_std):
    """An answer without weight has the advantage that it would have had in their place."""
    options = ObjectiveConfig(baseline=baseline, scale_by_std=scale_by_std and baseline != "log_mean_exp")
    whole = group_advantages(np.array(rewards, float), np.zeros(len(rewards), int), np.ones(len(rewards)), options)
    right = sum(rewards)
    reward, weight = np.array([1.0, 0.0, *rewards]), np.array([right, len(rewards) - right, *np.zeros(len(rewards))])
    found = group_advantages(reward, np.zeros(len(reward), int), weight, options)[2:]
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-12)
