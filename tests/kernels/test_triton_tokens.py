"""The kernels over tokens against the plain functions in float64, and against closed forms.

The oracle gets the same numbers as the kernels, so that what differs is the kernels' own rounding.
"""

import math
import os
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET")):
    pytest.skip("Triton kernels need a GPU, or TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from exgrpo.kernels import reference
from exgrpo.kernels.chunks.softmax import PolicyRows, RowTerms, Sums, Upstream, finished, row_factors
from exgrpo.kernels.inputs import PolicyTokens, ScoredTokens, Surrogate
from exgrpo.kernels.objective import MAX_LOG_RATIO, policy_objective
from exgrpo.kernels.triton_chunks import triton_tokens

from .conftest import DEVICE


@pytest.fixture(params=[torch.float32, torch.float64], ids=["fp32", "fp64"])
def dtype(request):
    return request.param


def tolerance(dtype):
    """A GPU's exp in fp32 is good to some roundings of its exponent, which is up to MAX_LOG_RATIO here."""
    return {"rtol": 4 * MAX_LOG_RATIO * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}


def double(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def assert_same_bits(first, second):
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


# ---- statistics


def make_sums(rows, dtype, device):
    """Sums as the head gives them: the target is the anchor, or some other word is, which then is in S."""
    anchored = torch.rand(rows) < 0.5
    gap = torch.where(anchored, 0.0, -30 * torch.rand(rows, dtype=torch.float64))
    small = 10 ** (9 * torch.rand(rows, dtype=torch.float64) - 8)
    rest = torch.where(anchored, small, 1 + small)
    moment = -small * (1 + 5 * torch.rand(rows, dtype=torch.float64))
    return sums_of(*(values.to(dtype).to(device) for values in (gap, rest, moment)))


def sums_of(gap, rest, moment):
    """With anchors that no result depends on."""
    return Sums(torch.full_like(gap, 3.0), gap, rest, moment)


def statistics(sums):
    """U, log p_y and H in float64, and all statistics."""
    found, result = finished(Sums(*(values.double() for values in sums)))
    return found.mean, *result, found


def finished_by_kernel(sums):
    """U, log p_y and H."""
    found, result = triton_tokens.finished(sums)
    assert all(mine is given for mine, given in zip(found[:3], sums[:3], strict=True))
    return found.mean, *result


@pytest.mark.parametrize("rows", [0, 1, 127, 128, 300])
def test_statistics(rows, dtype, device):
    sums = make_sums(rows, dtype, device)
    found = finished_by_kernel(sums)
    assert all(values.dtype == dtype for values in found)
    for ours, true in zip(found, statistics(sums)[:3], strict=True):
        torch.testing.assert_close(ours.double(), true, **tolerance(dtype))


def test_a_certain_target_keeps_its_digits(dtype, device):
    """log p_y = -log1p(S) and H = log1p(S) - M / (1 + S) to a few ulps, however small S is."""
    rest = torch.logspace(-30, 0, 61, dtype=torch.float64).to(dtype).to(device)
    moment = -8 * rest
    mean, log_prob, entropy = finished_by_kernel(sums_of(torch.zeros_like(rest), rest, moment))
    s, m = rest.double(), moment.double()
    for ours, true in ((mean, m / (1 + s)), (log_prob, -s.log1p()), (entropy, s.log1p() - m / (1 + s))):
        torch.testing.assert_close(ours.double(), true, rtol=8 * torch.finfo(dtype).eps, atol=0)


def test_an_impossible_target(dtype, device):
    """A logit of -inf: the probability is 0, the entropy that of the other words."""
    gap, rest, moment = torch.tensor([[-math.inf], [2.0], [-1.0]], dtype=dtype, device=device)
    mean, log_prob, entropy = finished_by_kernel(sums_of(gap, rest, moment))
    assert log_prob.item() == -math.inf
    assert mean.item() == -0.5
    assert entropy.item() == pytest.approx(math.log(2) + 0.5)


# ---- rows of the policy loss


def oracle_rows(sums, tokens, terms, temperature):
    """The same by the functions of the plain backend, in float64."""
    mean, log_prob, its_entropy, exact = statistics(sums)
    objective = policy_objective(log_prob, PolicyTokens(*map(double, tokens)), terms.surrogate)
    coefficient = -objective.coefficient / terms.normalizer
    coef = terms.entropy_coef
    entropy = torch.full_like(coefficient, -coef) / terms.normalizer if coef else None
    scale, at_target, _ = row_factors(double(temperature), terms.softcap, exact, Upstream(coefficient, entropy))
    return PolicyRows(
        value=objective.value,
        log_prob=log_prob,
        entropy=its_entropy,
        ratio=objective.ratio,
        clipped=objective.clipped.double(),
        mean=mean,
        coefficient=coefficient,
        scale=scale,
        at_target=at_target,
    )


def make_rows(rows, dtype, device):
    """Sums; and tokens with old log-probs around the policy's own, advantages (a tenth 0) and replayed flags."""
    sums = make_sums(rows, dtype, device)
    old = statistics(sums)[1] + 0.4 * torch.randn(rows, dtype=torch.float64).to(device)
    advantage = torch.randn(rows, dtype=torch.float64)
    advantage[torch.rand(rows) < 0.1] = 0
    replayed = (torch.rand(rows) < 0.4).to(device)
    return sums, PolicyTokens(old.to(dtype), advantage.to(dtype).to(device), replayed)


def row_terms(*, clip=(0.2, 0.2), beta=0.1, entropy_coef=0.0, normalizer=7.0, softcap=None):
    """Terms of rows on the device under test."""
    return RowTerms(Surrogate(clip, beta), entropy_coef, torch.as_tensor(normalizer, device=DEVICE), softcap)


TERMS = row_terms()
VARIANTS = [
    {},
    {"clip": None},
    {"beta": None},
    {"clip": (0.1, 0.3), "beta": 2.0, "replayed": None},
    {"clip": None, "beta": None, "replayed": None},
    {"temperature": True, "normalizer": torch.tensor(3.5)},
    {"softcap": 30.0, "normalizer": torch.tensor(11)},
    {"softcap": 30.0, "temperature": True, "entropy_coef": 0.02},
    {"entropy_coef": 0.3, "normalizer": torch.tensor(5.0, dtype=torch.float64)},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_policy_rows(variant, dtype, device):
    sums, tokens = make_rows(200, dtype, device)
    given = dict(variant)
    tokens = tokens._replace(replayed=given.pop("replayed", tokens.replayed))
    temperature = (0.5 + torch.rand(200)).to(dtype).to(device) if given.pop("temperature", False) else None
    terms = row_terms(**given)
    found = triton_tokens.policy_rows(sums, tokens, terms, temperature)
    exact = oracle_rows(sums, tokens, terms, temperature)
    assert exact.clipped.any() == (terms.surrogate.clip is not None)
    for ours, true in zip(found, exact, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), true, **tolerance(dtype))


@pytest.mark.parametrize("rows", [0, 1, 129])
def test_any_number_of_rows(rows, dtype, device):
    sums, tokens = make_rows(rows, dtype, device)
    found = triton_tokens.policy_rows(sums, tokens, TERMS, None)
    exact = oracle_rows(sums, tokens, TERMS, None)
    for ours, true in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), true, **tolerance(dtype))


def test_ratios_out_of_bounds(dtype, device):
    """Beyond the bound, -inf included, fresh tokens have no gradient; a replayed one's goes to 0 by itself."""
    sums = sums_of(*(torch.tensor([x, x, x, x], dtype=dtype, device=device) for x in (0.0, 1e-3, -4e-3)))
    old = torch.tensor([-25.0, -math.inf, -math.inf, -25.0], dtype=dtype, device=device)
    advantage = torch.tensor([-1.0, -1.0, 1.0, 2.0], dtype=dtype, device=device)
    replayed = torch.tensor([False, False, True, True], device=device)
    tokens = PolicyTokens(old, advantage, replayed)
    found = triton_tokens.policy_rows(sums, tokens, TERMS, None)
    exact = oracle_rows(sums, tokens, TERMS, None)
    assert found.coefficient[:3].tolist() == [0, 0, 0]
    for ours, true in zip(found, exact, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours.double(), true, **tolerance(dtype))


def test_the_policy_itself_has_ratio_one(dtype, device):
    sums, (_, advantage, _) = make_rows(64, dtype, device)
    old = triton_tokens.finished(sums)[1].log_prob
    found = triton_tokens.policy_rows(sums, PolicyTokens(old, advantage, None), TERMS, None)
    assert (found.ratio == 1).all()
    assert not found.clipped.any()
    assert torch.equal(found.value, advantage)


def test_a_broken_row_shows_and_stays_alone(dtype, device):
    sums, tokens = make_rows(5, dtype, device)
    sums.rest[2] = math.nan
    found = triton_tokens.policy_rows(sums, tokens, TERMS, None)
    assert found.log_prob[2].isnan()
    assert found.value[2].isnan()
    assert torch.stack(found)[:, [0, 1, 3, 4]].isfinite().all()


def test_rows_repeat_to_the_bit_from_any_strides_and_dtypes(device):
    sums, (old, advantage, replayed) = make_rows(150, torch.float32, device)
    tokens = PolicyTokens(old.bfloat16(), advantage.double(), replayed)
    first = triton_tokens.policy_rows(sums, tokens, TERMS, None)
    assert_same_bits(first, triton_tokens.policy_rows(sums, tokens, TERMS, None))

    def apart(x):
        return torch.stack((x, x), dim=1)[:, 0]

    own = PolicyTokens(apart(tokens.old_log_prob.float()), apart(tokens.advantage.float()), apart(replayed))
    assert_same_bits(first, triton_tokens.policy_rows(Sums(*map(apart, sums)), own, TERMS, None))


# ---- tokens whose log-probability is known


def make_tokens(count, dtype, device):
    log_prob = (-4 * torch.rand(count, dtype=torch.float64)).to(dtype)
    values = {
        "log_prob": log_prob,
        "entropy": torch.rand(count, dtype=torch.float64).to(dtype),
        "old_log_prob": log_prob + (0.4 * torch.randn(count, dtype=torch.float64)).to(dtype),
        "advantage": torch.randn(count, dtype=torch.float64).to(dtype),
        "replayed": torch.rand(count) < 0.4,
        "mask": torch.rand(count) < 0.8,
    }
    return {name: value.to(device) for name, value in values.items()}


class Objective(NamedTuple):
    log_prob: torch.Tensor
    entropy: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    coefficient: torch.Tensor
    value_sum: torch.Tensor
    entropy_sum: torch.Tensor
    tokens: torch.Tensor


def objective_of(log_prob, entropy, old_log_prob, advantage, replayed, mask, clip, beta):
    scored = ScoredTokens(log_prob, entropy, PolicyTokens(old_log_prob, advantage, replayed), mask)
    sums, per_token, coefficient = triton_tokens.token_objective(scored, Surrogate(clip, beta))
    return Objective(*per_token, coefficient, *sums)


def oracle_objective(log_prob, entropy, old_log_prob, advantage, replayed, mask, clip, beta):
    """Results and sums of the oracle of the public functions, the derivative by autograd."""
    leaf = log_prob.double().requires_grad_()
    result = reference.policy_loss(
        leaf,
        double(old_log_prob),
        double(advantage),
        replayed=replayed,
        entropy=double(entropy),
        mask=mask,
        clip=clip,
        beta=beta,
        normalizer=1.0,
    )
    coefficient = -torch.autograd.grad(result.loss, leaf)[0]
    count = torch.tensor(log_prob.numel(), device=log_prob.device) if mask is None else mask.sum()
    sums = -result.loss.detach(), result.entropy.sum(), count.double()
    return result.log_prob, result.entropy, result.ratio, result.clipped, coefficient, *sums


def assert_objective(found, exact, dtype):
    """Sums have an error of their largest terms."""
    for ours, true in zip(found[:5], exact[:5], strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), true, **tolerance(dtype))
    size = 1 + (exact[2] * 4).sum().item()  # of all values together: advantages are below 4
    for ours, true in zip(found[5:7], exact[5:7], strict=True):
        assert ours.shape == ()
        assert abs(ours.item() - true.item()) <= 32 * torch.finfo(dtype).eps * size
    assert found.tokens.item() == exact[7].item()


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"clip": None},
        {"beta": None},
        {"replayed": None, "entropy": None},
        {"mask": None, "clip": (0.1, 0.3), "beta": 1.0},
        {"mask": None, "replayed": None, "entropy": None, "clip": None, "beta": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 300])
def test_objective(variant, count, dtype, device):
    values = {**make_tokens(count, dtype, device), "clip": (0.2, 0.2), "beta": 0.1, **variant}
    assert_objective(objective_of(**values), oracle_objective(**values), dtype)


@settings(max_examples=40)
@given(
    log_ratio=st.lists(st.floats(-40, 40), min_size=1, max_size=20),
    advantage=st.floats(-3, 3),
    replayed=st.booleans(),
    clip=st.one_of(st.none(), st.tuples(st.floats(0, 0.9), st.floats(0, 0.9))),
    beta=st.one_of(st.none(), st.floats(0.01, 10)),
)
def test_every_branch(log_ratio, advantage, replayed, clip, beta):
    """Of a token, in float64; at a corner, where a rounding decides the branch, nothing is claimed."""
    log_prob = torch.tensor(log_ratio, dtype=torch.float64, device=DEVICE)
    ratio = log_prob.clamp(max=MAX_LOG_RATIO).exp()
    corners = [math.exp(MAX_LOG_RATIO)] + ([1 - clip[0], 1 + clip[1]] if clip else [])
    clear = torch.stack([(ratio - corner).abs() > 1e-9 * corner for corner in corners]).all(0)
    clear |= log_prob > MAX_LOG_RATIO + 1e-6
    inputs = (torch.zeros_like(log_prob), torch.full_like(log_prob, advantage))
    flags = torch.full_like(log_prob, replayed, dtype=torch.bool)
    found = objective_of(log_prob, None, *inputs, flags, clear, clip, beta)
    exact = policy_objective(log_prob, PolicyTokens(*inputs, flags), Surrogate(clip, beta))
    for ours, true in (
        (found.ratio, exact.ratio),
        (found.clipped, exact.clipped.double()),
        (found.coefficient, exact.coefficient),
    ):
        torch.testing.assert_close(ours, true.masked_fill(~clear, 0), rtol=1e-12, atol=1e-14)
    expected = exact.value.masked_fill(~clear, 0)
    assert found.value_sum.item() == pytest.approx(expected.sum().item(), abs=1e-12 * (1 + expected.abs().sum().item()))


def test_garbage_at_masked_positions(dtype, device):
    clean = make_tokens(200, dtype, device)
    mask = clean["mask"]
    garbage = {"log_prob": math.nan, "entropy": math.nan, "old_log_prob": math.inf, "advantage": -math.inf}
    dirty = {**clean, **{name: clean[name].masked_fill(~mask, value) for name, value in garbage.items()}}
    found = objective_of(**dirty, clip=(0.2, 0.2), beta=0.1)
    assert_same_bits(found, objective_of(**clean, clip=(0.2, 0.2), beta=0.1))
    assert not torch.stack(found[:5])[:, ~mask].any()


@pytest.mark.parametrize("count", [0, 200])
def test_nothing_to_do(count, dtype, device):
    values = make_tokens(count, dtype, device)
    values["mask"] = torch.zeros_like(values["mask"])
    found = objective_of(**values, clip=(0.2, 0.2), beta=0.1)
    assert [len(per_token) for per_token in found[:5]] == [count] * 5
    assert not any(result.any() for result in found)


def test_broken_tokens_that_take_part_show(dtype, device):
    values = make_tokens(10, dtype, device)
    values["mask"][:] = True
    values["log_prob"][3] = math.nan
    found = objective_of(**values, clip=(0.2, 0.2), beta=None)
    assert found.value_sum.isnan()
    assert found.coefficient.isnan().nonzero().tolist() == [[3]]


def test_tokens_repeat_to_the_bit_from_any_strides_and_dtypes(device):
    values = make_tokens(300, torch.float32, device)
    values["old_log_prob"] = values["old_log_prob"].half()
    values["advantage"] = values["advantage"].double()
    first = objective_of(**values, clip=(0.2, 0.2), beta=0.1)
    apart = {name: torch.stack((value, value), dim=1)[:, 0] for name, value in values.items()}
    assert_same_bits(first, objective_of(**values, clip=(0.2, 0.2), beta=0.1))
    assert_same_bits(first, objective_of(**apart, clip=(0.2, 0.2), beta=0.1))
