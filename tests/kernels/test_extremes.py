"""Rows where a softmax in float32 loses everything if it is written carelessly."""

import math

import pytest
import torch

from exgrpo.kernels import linear_log_prob, reference

from .support import Case, compare, error, fewer_interpreted, make_case


def head_of_logits(logits, target, dtype=torch.float32, device="cpu"):
    """Hidden states that pick rows of a weight: the logits [T, V] are exactly the numbers given."""
    logits = torch.as_tensor(logits, dtype=dtype, device=device)
    hidden = torch.eye(logits.shape[0], dtype=dtype, device=device)
    target = torch.as_tensor(target, device=device)
    return Case(hidden.requires_grad_(), logits.T.contiguous().requires_grad_(), target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_words_keep_their_relative_precision(dtype, backend, device):
    """Over all gaps between two logits: log p, 1 - p and the entropy shrink to 1e-35, and each keeps its digits."""
    wide, near = fewer_interpreted(4000, 32), fewer_interpreted(100)
    gap = torch.cat((torch.linspace(-85, 85, wide), torch.logspace(-20, 1, near))).to(dtype)
    hidden = gap.to(device).unsqueeze(1).requires_grad_()
    weight = torch.tensor([[1.0], [0.0]], dtype=dtype, device=device)
    found = linear_log_prob(hidden, weight, torch.zeros(len(gap), dtype=torch.int64, device=device), backend=backend)
    slopes = [torch.autograd.grad(value.sum(), hidden, retain_graph=True)[0].squeeze(1) for value in found]
    gap = gap.double()
    rest = (-gap).exp()
    expected = [-rest.log1p(), rest.log1p() + gap / (1 + gap.exp())]
    expected += [1 / (1 + gap.exp()), -gap / (1 + gap.exp()) / (1 + rest)]
    roundings = 16 * torch.finfo(dtype).eps
    for mine, true in zip([*found, *slopes], expected, strict=True):
        # For hopeless targets the entropy, p (1 - log p), is a small difference of terms as large as the gap.
        few = roundings * (1 + gap.abs()) * (gap < 0)
        assert ((mine.detach().cpu().double() - true).abs() <= roundings * true.abs() + few).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_caps_keep_their_relative_precision(dtype, backend, device):
    """The log-prob of one of two words whose capped logits are c and 0, over all logits."""
    size = torch.logspace(-6, 3, fewer_interpreted(500, 8))
    logit = torch.cat((size, -size)).to(dtype)
    hidden, weight = logit.unsqueeze(1).to(device), torch.tensor([[1.0], [0.0]], dtype=dtype, device=device)
    target = torch.ones(len(logit), dtype=torch.int64, device=device)
    log_prob, _ = linear_log_prob(hidden, weight, target, softcap=5.0, backend=backend)
    exact = -(5 * torch.tanh(logit.double() / 5)).exp().log1p()
    torch.testing.assert_close(log_prob.double().cpu(), exact, rtol=16 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_vocabulary(dtype, backend, device):
    """Sums of 150,000 terms: no further from float64 than plain torch in fp32, whose error they dominate."""
    case = make_case(fewer_interpreted(24), 64, 151_936, dtype, device, ignored=False)
    with torch.no_grad():
        log_prob, entropy = case.log_prob(backend=backend)
        plain, exact = (case.to(one).log_prob(reference.linear_log_prob) for one in (torch.float32, torch.float64))
    assert error(log_prob, exact.log_prob) <= error(plain.log_prob, exact.log_prob)
    assert error(entropy, exact.entropy) <= error(plain.entropy, exact.entropy)


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

    def call(some, name):
        found = some.log_prob(backend=name)
        return list(found), some.gradients((torch.stack(found) * upstream).sum())

    compare(call, case, backend)
    log_prob, entropy = case.log_prob(backend=backend)
    assert (log_prob < -200).any() or options.get("softcap")
    assert (log_prob <= 0).all()
    assert (entropy >= 0).all()


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
