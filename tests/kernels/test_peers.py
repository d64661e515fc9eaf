"""Other people's implementations as oracles on the same inputs: they share code neither with ours nor the reference."""

import pytest
import torch

from exgrpo.kernels import reference

from . import peers
from .support import assert_as_good, make_case, make_tokens, relative_error

# Norm of the difference over norm of the value. Sums in another order differ by a few roundings (at most 6 over a dozen
# seeds), and by more where terms of both signs cancel, as in the policy loss (at most 18). What is wrong differs more.
AGREEMENT = 64 * torch.finfo(torch.float32).eps
CLIP = (0.2, 0.28)


def check(ours, theirs, exact):
    """Ours are the peer's up to rounding, and not twice as far from float64."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        assert relative_error(mine, other) <= AGREEMENT
    assert_as_good(ours, theirs, exact, measure=relative_error)


@pytest.mark.parametrize(
    ("load", "bias", "softcap"),
    [
        (peers.verl_torch, False, None),
        (peers.verl_triton, False, None),
        (peers.trl_chunked, False, None),
        (peers.trl_chunked, True, 5.0),
    ],
)
def test_log_prob_and_entropy(load, bias, softcap, backend, device, monkeypatch):
    """More than one block of tokens and one split of the vocabulary of verl's, none of them full."""
    shape = (140, 128, 1300)
    case = make_case(*shape, torch.float32, device, bias=bias, ignored=False, temperature=1.5, softcap=softcap)
    upstream = [torch.randn(140, device=device) for _ in range(2)]

    def outputs_and_gradients(case, function):
        results = function(case)
        loss = sum((value * up.to(value.dtype)).sum() for value, up in zip(results, upstream, strict=True))
        return [*results, *case.gradients(loss)]

    ours = outputs_and_gradients(case, lambda case: case.log_prob(backend=backend))
    exact = outputs_and_gradients(case.to(torch.float64), lambda case: case.log_prob(reference.linear_log_prob))
    check(ours, outputs_and_gradients(case, load(monkeypatch)), exact)


@pytest.mark.parametrize(
    ("load", "bias", "softcap"),
    [
        (peers.torch_cross_entropy, False, None),
        (peers.cut_cross_entropy, False, 5.0),
        (peers.liger_cross_entropy, False, None),
        (peers.liger_cross_entropy, True, None),
    ],
)
def test_cross_entropy(load, bias, softcap, backend, device, monkeypatch):
    """Its sum over the tokens that are not ignored; every seventh is."""
    case = make_case(60, 48, 300, torch.float32, device, bias=bias, softcap=softcap)

    def value_and_gradients(case, function):
        value = function(case)
        return [value, *case.gradients(value)]

    ours = value_and_gradients(case, lambda case: -case.log_prob(backend=backend).log_prob.sum())
    exact = value_and_gradients(
        case.to(torch.float64), lambda case: -case.log_prob(reference.linear_log_prob).log_prob.sum()
    )
    check(ours, value_and_gradients(case, load(monkeypatch)), exact)


@pytest.mark.parametrize(("loss_type", "normalizer"), [("dapo", None), ("dr_grpo", 4 * 21)])
@pytest.mark.parametrize("load", [peers.liger_fused_policy_loss, peers.liger_triton_policy_loss])
def test_policy_loss(load, loss_type, normalizer, backend, device, monkeypatch):
    """Fresh tokens, clipped on both sides; divided by the number of tokens, or by a constant as in Dr. GRPO."""
    case = make_case((4, 21), 48, 300, torch.float32, device, bias=True, ignored=False, temperature=1.5)
    old_log_prob, advantage, _ = make_tokens(case)
    advantage = advantage[:, 0] + torch.tensor([2, -2, 2, -2], device=device)
    mask = torch.rand(4, 21, device=device) < 0.8

    def of(case, **more):
        options = {"clip": CLIP, "normalizer": normalizer, "mask": mask, **more}
        result = case.policy_loss(old_log_prob, advantage, **options)
        return [result.loss, result.clipped.sum() / mask.sum(), *case.gradients(result.loss)]

    ours = of(case, backend=backend)
    exact = of(case.to(torch.float64), function=reference.linear_policy_loss)
    loss, clipped = load(monkeypatch)(case, old_log_prob, advantage, mask, CLIP, loss_type)
    assert 0.1 < clipped < 0.9
    check(ours, [loss, clipped, *case.gradients(loss)], exact)
