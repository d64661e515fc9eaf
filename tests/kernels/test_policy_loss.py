"""The objective on log-probabilities by every backend, and its two ratios."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exgrpo.kernels import importance_ratio, policy_loss, reference, shape_ratio

from .conftest import DEVICE
from .support import INTERPRETING

pytestmark = pytest.mark.usefixtures("chosen")
TERMS = [
    {},
    {"clip": None},
    {"clip": (0.1, 0.3), "beta": None},
    {"beta": 1.0, "normalizer": 11},
    {"normalizer": torch.tensor(3.5, device=DEVICE), "entropy_coef": 0.2},
    {"replayed": None, "entropy": None},
    {"mask": None, "replayed": None, "entropy": None, "clip": None, "beta": None},
]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}


def make(dtype=torch.float64):
    log_prob = (-3 * torch.rand(5, 70, dtype=torch.float64)).to(dtype).requires_grad_()
    old = log_prob.detach() + 0.3 * torch.randn(5, 70, dtype=torch.float64).to(dtype)
    entropy = torch.rand(5, 70, dtype=torch.float64).to(dtype).requires_grad_()
    mask = torch.rand(5, 70) < 0.8
    return log_prob, old, torch.randn(5, dtype=torch.float64).to(dtype), entropy, mask


@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("present", [False, True], ids=["", "inf"])
def test_agrees_with_the_oracle(terms, dtype, present, device):
    """``present``: inf stands for the log-prob of the present policy, which the oracle gets itself."""
    log_prob, old, advantage, entropy, mask = make(dtype)
    replayed = torch.tensor([True, False, False, True, False])
    more = {"replayed": replayed, "entropy": entropy, "mask": mask, **terms}
    known = torch.rand(old.shape) < (0.5 if present else 0)
    ours = policy_loss(log_prob, old.masked_fill(known, math.inf), advantage, **more)
    assert all(values.dtype == (dtype if dtype == torch.float64 else torch.float32) for values in ours)
    wide = {name: x.double() if name == "entropy" and x is not None else x for name, x in more.items()}
    old = torch.where(known, log_prob.detach(), old)
    exact = reference.policy_loss(log_prob.double(), old.double(), advantage.double(), **wide)
    tolerance = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    torch.testing.assert_close([x.double() for x in ours], list(exact), **tolerance)
    leaves = (log_prob, entropy) if more["entropy"] is not None else (log_prob,)
    mine, true = (torch.autograd.grad(result.loss, leaves) for result in (ours, exact))
    assert all(gradient.dtype == dtype for gradient in mine)
    if dtype == torch.bfloat16:  # to which gradients are rounded at the end
        tolerance["rtol"] = 2.0**-8
    torch.testing.assert_close(mine, true, **tolerance)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (6,)])
def test_nothing_to_do(shape):
    log_prob = torch.full(shape, torch.nan, requires_grad=True)
    result = policy_loss(log_prob, log_prob.detach(), log_prob.detach(), mask=torch.zeros(shape, dtype=torch.bool))
    assert result.loss.item() == 0
    assert not any(values.any() for values in result)
    assert not torch.autograd.grad(result.loss, log_prob)[0].any()


def test_garbage_at_masked_positions():
    log_prob, old, _, entropy, mask = make()
    advantage = torch.randn(5, 70, dtype=torch.float64)
    clean = policy_loss(log_prob, old, advantage, entropy=entropy, entropy_coef=0.1, mask=mask)
    expected = torch.autograd.grad(clean.loss, (log_prob, entropy))
    dirty = [
        x.detach().masked_fill(~mask, y) for x, y in ((log_prob, math.nan), (old, math.inf), (advantage, -math.inf))
    ]
    leaves = dirty[0].requires_grad_(), entropy.detach().masked_fill(~mask, math.nan).requires_grad_()
    result = policy_loss(*dirty, entropy=leaves[1], entropy_coef=0.1, mask=mask)
    assert all(map(torch.equal, clean, result))
    assert all(map(torch.equal, expected, torch.autograd.grad(result.loss, leaves)))


@settings(max_examples=30 if INTERPRETING else 100)
@given(
    log_ratio=st.floats(-40, 40),
    advantage=st.floats(-3, 3),
    replayed=st.booleans(),
    clip=st.one_of(st.none(), st.tuples(st.floats(0, 0.9), st.floats(0, 0.9))),
    beta=st.one_of(st.none(), st.floats(0.01, 10)),
)
def test_every_branch_of_a_token(log_ratio, advantage, replayed, clip, beta):
    """Away from the corners, where either one-sided derivative is right."""
    ratio = math.exp(min(log_ratio, 20.0))
    corners = [1 - clip[0], 1 + clip[1]] if clip else []
    corners.append(math.exp(20.0))
    if any(abs(ratio - corner) < 1e-9 * corner for corner in corners):
        return
    log_prob = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    zero, flags = torch.zeros(1, dtype=torch.float64), torch.tensor([replayed])
    tokens = (log_prob, zero, torch.tensor([advantage], dtype=torch.float64))
    ours, exact = (
        function(*tokens, replayed=flags, clip=clip, beta=beta) for function in (policy_loss, reference.policy_loss)
    )
    assert ours.loss.item() == pytest.approx(exact.loss.item(), rel=1e-9, abs=1e-12)
    assert ours.ratio.item() == pytest.approx(exact.ratio.item(), rel=1e-12)
    assert ours.clipped.item() == exact.clipped.item()
    mine, true = (torch.autograd.grad(result.loss, log_prob)[0].item() for result in (ours, exact))
    assert mine == pytest.approx(true, rel=1e-6, abs=1e-8)


def test_the_same_bits_from_any_strides_and_dtypes():
    log_prob, old, advantage, entropy, mask = make(torch.float32)
    old, advantage = old.half(), advantage.double()
    first = policy_loss(log_prob, old, advantage, entropy=entropy, mask=mask)
    apart = [torch.stack((x, x), dim=-1)[..., 0] for x in (log_prob, old, advantage, entropy, mask)]
    again = policy_loss(*apart[:3], entropy=apart[3], mask=apart[4])
    assert all(map(torch.equal, first, again))


def test_a_broken_token_that_takes_part_shows():
    log_prob, old, advantage, *_ = make()
    with torch.no_grad():
        log_prob[1, 3] = math.nan
    loss = policy_loss(log_prob, old, advantage, beta=None).loss
    assert loss.isnan()
    assert policy_loss(log_prob, torch.full_like(old, math.inf), advantage).loss.isnan()
    assert torch.autograd.grad(loss, log_prob)[0].isnan().nonzero().tolist() == [[1, 3]]


def test_importance_ratio():
    log_prob = torch.tensor([-1.0, -1.0, 0.0, 0.0], requires_grad=True)
    old = torch.tensor([-1.0, -2.0, -30.0, 30.0])
    ratio = importance_ratio(log_prob, old)
    assert ratio.tolist() == pytest.approx([1.0, math.e, math.exp(20), math.exp(-30)], rel=1e-6)
    (slope,) = torch.autograd.grad(ratio.sum(), log_prob)
    assert slope.tolist() == pytest.approx([1.0, math.e, 0.0, math.exp(-30)], rel=1e-6)


def test_shape_ratio():
    """w / (w + beta): 0 at 0, a half at beta, with at most a quarter of slope in log w."""
    for beta in (1e-3, 0.1, 10.0):
        w = torch.tensor([0.0, beta / 3, beta, math.exp(20.0)], dtype=torch.float64, requires_grad=True)
        shaped = shape_ratio(w, beta)
        assert shaped.tolist() == pytest.approx([0, 0.25, 0.5, 1 / (1 + beta / math.exp(20.0))])
        (slope,) = torch.autograd.grad(shaped.sum(), w)
        assert (slope * w).tolist() == pytest.approx([0, 3 / 16, 0.25, beta * math.exp(-20.0)])
