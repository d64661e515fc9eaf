"""The compiled token kernels by themselves: against the same formulas in float64, bits, schemas, arguments."""

import pytest
import torch

from exgrpo.kernels import extension

if extension.MISSING:
    pytest.skip(extension.MISSING, allow_module_level=True)

from exgrpo.kernels import objective
from exgrpo.kernels.chunks import softmax
from exgrpo.kernels.chunks.softmax import RowTerms, Sums
from exgrpo.kernels.cpu_chunks import cpu_tokens
from exgrpo.kernels.extension import OPERATORS
from exgrpo.kernels.inputs import PolicyTokens, ScoredTokens, Surrogate

from .support import check_schema

TOKENS = 9001
TERMS = [(None, None), ((0.2, 0.3), None), (None, 0.1), ((0.2, 0.3), 2.0)]


@pytest.fixture(params=[torch.float32, torch.float64], ids=["fp32", "fp64"])
def dtype(request):
    return request.param


def make_sums(dtype, rows=TOKENS):
    """From certain to hopeless targets, anchored at the largest logit: where the target is that, its gap is 0."""
    rest = torch.logspace(-35, 5, rows, dtype=torch.float64)
    certain = rest < 1
    gap = torch.where(certain, 0.0, -torch.logspace(-6, 3, rows, dtype=torch.float64))
    return Sums(torch.zeros(rows, dtype=dtype), gap.to(dtype), rest.to(dtype), (-2 * rest).to(dtype))


def make_tokens(dtype, rows=TOKENS):
    """Old log-probabilities, advantages, replayed, mask."""
    old, advantage = torch.randn(2, rows, dtype=dtype)
    return old - 2, advantage, torch.rand(rows) < 0.3, torch.rand(rows) < 0.8


def assert_close(found, exact, dtype, roundings=32):
    bound = roundings * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact.double(), rtol=bound, atol=0, equal_nan=True)


def test_finish_keeps_relative_precision(dtype):
    """However close p is to 1, each result keeps its digits."""
    sums = make_sums(dtype)
    found, (log_prob, entropy) = cpu_tokens.finished(sums)
    statistics, exact = softmax.finished(Sums(*(value.double() for value in sums)))
    assert_close(found.mean, statistics.mean, dtype)
    assert all(mine is given for mine, given in zip(found[:3], sums[:3], strict=True))
    assert_close(log_prob, exact.log_prob, dtype)
    assert_close(entropy, exact.entropy, dtype)


@pytest.mark.parametrize(("clip", "beta"), TERMS)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
@pytest.mark.parametrize("tempered", [False, True])
def test_policy_rows(clip, beta, entropy_coef, tempered, dtype):
    sums = Sums(*(value[TOKENS // 2 :] for value in make_sums(dtype)))
    rows = len(sums.gap)
    old, advantage, replayed, _ = make_tokens(dtype, rows)
    old = softmax.finished(sums)[1].log_prob + old / 4
    temperature = torch.linspace(0.5, 2, rows, dtype=dtype) if tempered else None
    tokens = PolicyTokens(old, advantage, replayed)
    terms = RowTerms(Surrogate(clip, beta), entropy_coef, torch.tensor(7), softcap=None)

    def exact_rows(to):
        tau = None if temperature is None else temperature.to(to)
        values = Sums(*(value.to(to) for value in sums))
        own = PolicyTokens(old.to(to), advantage.to(to), replayed)
        return softmax.policy_rows(values, own, terms._replace(normalizer=torch.tensor(7.0, dtype=to)), tau)

    ours = cpu_tokens.policy_rows(sums, tokens, terms, temperature)
    for name, mine, plain, true in zip(ours._fields, ours, exact_rows(dtype), exact_rows(torch.float64), strict=True):
        # As near to the truth as the same formulas in torch; log-probabilities down to -1000 are rounded on the way. In
        # float64 that happens to the truth too: a rounding of theirs is a relative error of the ratio.
        roundings = 8 if dtype == torch.float32 else 8 + ours.log_prob.abs().max()
        error, theirs = (mine - true).abs().max(), (plain - true).abs().max()
        assert error <= 2 * theirs + roundings * torch.finfo(dtype).eps * true.abs().max(), name


@pytest.mark.parametrize(("clip", "beta"), TERMS)
@pytest.mark.parametrize("masked", [False, True])
def test_objective(clip, beta, masked, dtype):
    old, advantage, replayed, mask = make_tokens(dtype)
    log_prob, entropy = -torch.rand(TOKENS, dtype=dtype) * 4, torch.rand(TOKENS, dtype=dtype)
    if masked:
        for value in (old, advantage, log_prob, entropy):
            value[~mask] = torch.nan

    def scored(to):
        own = PolicyTokens(old.to(to), advantage.to(to), replayed)
        return ScoredTokens(log_prob.to(to), entropy.to(to), own, mask if masked else None)

    found = cpu_tokens.token_objective(scored(dtype), Surrogate(clip, beta))
    exact = objective.token_objective(scored(torch.float64), Surrogate(clip, beta))
    for mine, true in zip(found[1:], exact[1:], strict=True):
        assert_close(mine, true, dtype, roundings=100)
    # The sum of terms of both signs: as wrong as its terms are.
    assert (found[0] - exact[0]).abs().max() <= 100 * torch.finfo(dtype).eps * TOKENS
    assert found[0][2] == (mask.sum() if masked else TOKENS)


@pytest.mark.parametrize("scale_by_std", [False, True])
def test_groups(scale_by_std):
    reward, group = torch.rand(1000), torch.randint(-5, 40, (1000,), dtype=torch.int32)
    group[:3] = torch.tensor([100, -(2**31), 2**31 - 1])
    exact = objective.centre_groups(reward, group, scale_by_std)
    torch.testing.assert_close(cpu_tokens.centre_groups(reward, group, scale_by_std), exact, rtol=1e-12, atol=1e-12)
    assert cpu_tokens.centre_groups(reward[:0], group[:0], scale_by_std).shape == (0,)


def test_same_bits_for_any_number_of_threads(set_threads, dtype):
    sums, (old, advantage, replayed, mask) = make_sums(dtype, 50_000), make_tokens(dtype, 50_000)
    offsets = torch.arange(0, 50_001, 500)

    def everything():
        statistics, (log_prob, entropy) = cpu_tokens.finished(sums)
        scored = ScoredTokens(log_prob, entropy, PolicyTokens(old, advantage, replayed), mask)
        rest = cpu_tokens.token_objective(scored, Surrogate((0.2, 0.2), 0.1))
        return [statistics.mean, log_prob, entropy, *rest, cpu_tokens.segment_mean(entropy, mask, offsets)]

    set_threads(1)
    alone = everything()
    set_threads(2)
    assert all(torch.equal(a, b) for a, b in zip(alone, everything(), strict=True))


def test_operators_keep_their_schemas(dtype):
    _, *sums = make_sums(dtype, 30)
    old, advantage, replayed, mask = make_tokens(dtype, 30)
    one, bounds = torch.ones((), dtype=dtype), torch.tensor([0, 7, 7, 30])
    own = (old, advantage, replayed)
    check_schema(OPERATORS.finish, *sums)
    arguments = (*sums, *own, None, one, 0.8, 1.2, 0.1, 0.5, False)
    check_schema(OPERATORS.policy_rows, *arguments)
    check_schema(OPERATORS.token_objective, old, None, *own, mask, None, None, 0.1)
    check_schema(OPERATORS.centre_groups, old.double(), replayed.long(), True)
    check_schema(OPERATORS.segment_mean, old, mask, bounds)


@pytest.mark.parametrize("offsets", [[0, 8], [-1, 7], [0, 5, 3, 7]])
def test_segments_beside_the_values(offsets):
    with pytest.raises(RuntimeError, match="offsets: expected ascending positions among the values"):
        OPERATORS.segment_mean(torch.zeros(7), torch.ones(7, dtype=torch.bool), torch.tensor(offsets))
