"""Rows where a softmax in float32 loses everything if it is written carelessly."""

import math

import pytest
import torch

from exgrpo.kernels import linear_log_prob, reference

from .support import Case, assert_as_good, compare, error, make_case, relative_error


def head_of_logits(logits, target, dtype=torch.float32, device="cpu"):
    """Hidden states that pick rows of a weight: the logits [T, V] are exactly the numbers given."""
    logits = torch.as_tensor(logits, dtype=dtype, device=device)
    hidden = torch.eye(logits.shape[0], dtype=dtype, device=device)
    target = torch.as_tensor(target, device=device)
    return Case(hidden.requires_grad_(), logits.T.contiguous().requires_grad_(), target)


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("gap", [1.0, 17.0, 20.0, 80.0])
def test_certain_targets_keep_their_relative_precision(gap, dtype, rel, backend, device):
    """p(target) -> 1: log p, 1 - p and the entropy shrink to 1e-35 and each keeps its digits."""
    case = head_of_logits([[gap, 0.0]], [0], dtype, device=device)
    log_prob, entropy = case.log_prob(backend=backend)
    rest = math.exp(-gap)
    assert log_prob.item() == pytest.approx(-math.log1p(rest), rel=rel, abs=0)
    assert entropy.item() == pytest.approx(math.log1p(rest) + gap * rest / (1 + rest), rel=rel, abs=0)
    (_, slope) = torch.autograd.grad(log_prob.sum(), case.leaves, retain_graph=True)
    assert slope.flatten().tolist() == pytest.approx([rest / (1 + rest), -rest / (1 + rest)], rel=rel, abs=0)
    (_, slope) = torch.autograd.grad(entropy.sum(), case.leaves)
    expected = gap * rest / (1 + rest) ** 2
    assert slope.flatten().tolist() == pytest.approx([-expected, expected], rel=10 * rel, abs=0)


@pytest.mark.parametrize("depth", [88.0, 104.0, 1e4])
def test_hopeless_targets(depth, backend, device):
    """p(target) below the smallest float32, down to logits of -1e4."""
    case = head_of_logits([[0.0, -depth, -1.0]], [1], device=device)
    log_prob, entropy = case.log_prob(backend=backend)
    exact = case.to(torch.float64).log_prob(reference.linear_log_prob)
    assert log_prob.item() == pytest.approx(exact.log_prob.item(), rel=1e-6)
    assert entropy.item() == pytest.approx(exact.entropy.item(), rel=1e-6)
    _, slope = torch.autograd.grad(log_prob.sum(), case.leaves, retain_graph=True)
    p = 1 / (1 + math.exp(-1))
    assert slope.flatten().tolist() == pytest.approx([-p, 1.0, p - 1], rel=1e-6)
    _, slope = torch.autograd.grad(entropy.sum(), case.leaves)
    assert slope.isfinite().all()
    assert slope.sum().abs() < 1e-6


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_logits_far_from_zero(shift, backend, device):
    """A shift of all logits changes nothing. Multiples of 1/8 stay exact at 1e4."""
    logits = (torch.randn(20, 33) * 8).round() / 8
    target = torch.randint(0, 33, (20,))
    near = head_of_logits(logits, target, device=device).log_prob(backend=backend)
    far = head_of_logits(logits + shift, target, device=device).log_prob(backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(near, far, strict=True))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.05}, {"softcap": 30.0}], ids=str)
def test_logits_hundreds_of_nats_wide(options, backend, device):
    case = make_case(40, 64, 301, torch.float32, device, spread=200.0, **options)
    upstream = torch.randn(2, 40, device=device)

    def run(case, function, **more):
        result = case.log_prob(function, **more)
        up = upstream.to(result.log_prob.dtype)
        return list(result), case.gradients((up * torch.stack(tuple(result))).sum())

    ours, our_gradients = run(case, linear_log_prob, backend=backend)
    plain, plain_gradients = run(case, reference.linear_log_prob)
    exact, exact_gradients = run(case.to(torch.float64), reference.linear_log_prob)
    assert (exact[0] < -200).any() or options.get("softcap")
    assert_as_good(ours, plain, exact)
    assert_as_good(our_gradients, plain_gradients, exact_gradients, measure=relative_error)
    assert (ours[0] <= 0).all()
    assert (ours[1] >= 0).all()


def test_words_ruled_out_by_the_bias(backend, device):
    """A bias of -inf (padding of the vocabulary) takes words out without a NaN."""
    case = make_case(30, 16, 40, torch.float64, device, bias=True)
    case.target[:] = torch.randint(0, 33, (30,), device=device)
    small = Case(
        case.hidden, case.weight.detach()[:33].requires_grad_(), case.target, case.bias.detach()[:33].requires_grad_()
    )
    with torch.no_grad():
        case.bias[33:] = -torch.inf
    ours, exact = case.log_prob(backend=backend), small.log_prob(reference.linear_log_prob)
    torch.testing.assert_close(tuple(ours), tuple(exact))
    ours = case.gradients(ours.log_prob.sum() + ours.entropy.sum())
    exact = small.gradients(exact.log_prob.sum() + exact.entropy.sum())
    torch.testing.assert_close(ours[0], exact[0])
    torch.testing.assert_close(ours[1][:33], exact[1])
    assert not ours[1][33:].any()


@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, 19.0, 21.0, 1e4])
@pytest.mark.parametrize(
    ("advantage", "replayed", "clip"),
    [(1.0, False, (0.2, 0.2)), (-1.0, False, (0.2, 0.2)), (-1.0, False, None), (1.0, True, None)],
)
def test_ratios_beyond_float32(log_ratio, advantage, replayed, clip, backend, device):
    """Recorded log-probs far from the policy's: exp of the log-ratio is bounded, loss and gradients are finite."""
    case = make_case(5, 16, 40, torch.float32, device, ignored=False)
    old = case.log_prob(backend=backend).log_prob.detach() - log_ratio
    tokens = (old, torch.full((5,), advantage, device=device))
    more = {"replayed": torch.full((5,), replayed, device=device), "clip": clip}
    ours = case.policy_loss(*tokens, backend=backend, **more)
    exact_case = case.to(torch.float64)
    exact = exact_case.policy_loss(*tokens, function=reference.linear_policy_loss, **more)
    assert ours.loss.isfinite()
    assert ours.ratio.max() <= math.exp(20.0) * (1 + 1e-6)
    # An error of 1e-6 in the log-ratio is one of 1e-6 in the ratio, and so in the loss and its gradients.
    assert error(ours.loss, exact.loss) <= 1e-4 * max(1e-9, exact.loss.abs().item())
    for mine, true in zip(case.gradients(ours.loss), exact_case.gradients(exact.loss), strict=True):
        assert error(mine, true) <= 1e-4 * true.abs().max().item() + 1e-8


def test_garbage_at_masked_positions(backend, device):
    case = make_case(20, 16, 40, torch.float32, device, ignored=False)
    mask = torch.arange(20, device=device) % 3 > 0
    old, advantage = torch.full((20,), -3.0, device=device), torch.ones(20, device=device)
    clean = case.policy_loss(old, advantage, mask=mask, backend=backend)
    expected = case.gradients(clean.loss)
    old, advantage = old.masked_fill(~mask, torch.inf), advantage.masked_fill(~mask, torch.nan)
    with torch.no_grad():
        case.hidden[~mask] = torch.inf
    dirty = case.policy_loss(old, advantage, mask=mask, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(expected, case.gradients(dirty.loss), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_impossible_targets_beside_certain_ones(dtype, backend, device):
    check_impossible_targets(dtype, backend, device)


def check_impossible_targets(dtype, backend, device):
    """Targets 100 nats below the best word, whose exponentials would overflow, beside nearly certain ones."""
    case = make_case(20, 32, 60, dtype, device, ignored=False)
    with torch.no_grad():
        likely = case.hidden[:10] + 20 * case.weight[case.target[:10]]
        unlikely = case.hidden[10:] - 100 * case.weight[case.target[10:]] / case.weight.norm(dim=1).mean()
        case.hidden.copy_(torch.cat((likely, unlikely)))

    def call(some, name):
        log_prob, entropy = some.log_prob(linear_log_prob, backend=name)
        return [log_prob.detach(), entropy.detach()], some.gradients(log_prob.sum())

    compare(call, case, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_broken_shows(dtype, backend, device):
    """A hidden state in its token alone, a word's weight in every token, wherever the target is."""
    case = make_case(40, 32, 72, dtype, device, ignored=False)
    with torch.no_grad():
        whole = case.log_prob(linear_log_prob, backend=backend)
        case.hidden[5, 3] = torch.nan
        broken = case.log_prob(linear_log_prob, backend=backend)
        loss = case.policy_loss(whole.log_prob, torch.ones(40, device=device), backend=backend).loss
        case.hidden[5, 3] = 0
        case.weight[case.target[0], 0] = torch.nan
        everywhere = case.log_prob(linear_log_prob, backend=backend)
    others = torch.arange(40, device=device) != 5
    for found, expected in zip(broken, whole, strict=True):
        assert found[5].isnan()
        assert torch.equal(found[others], expected[others])
    assert loss.isnan()
    assert all(values.isnan().all() for values in everywhere)
