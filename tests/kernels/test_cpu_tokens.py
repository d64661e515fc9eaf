"""The compiled token kernels by themselves: bits, schemas, arguments. Values are tested by the public functions."""

import pytest
import torch

from exgrpo.kernels import extension

if extension.MISSING:
    pytest.skip(extension.MISSING, allow_module_level=True)

from exgrpo.kernels.chunks.softmax import Sums
from exgrpo.kernels.cpu_chunks import cpu_tokens
from exgrpo.kernels.extension import OPERATORS
from exgrpo.kernels.inputs import PolicyTokens, ScoredTokens, Surrogate

from .support import check_schema


@pytest.fixture(params=[torch.float32, torch.float64], ids=["fp32", "fp64"])
def dtype(request):
    return request.param


def make_sums(dtype, rows):
    """From certain to hopeless targets, anchored at the largest logit: where the target is that, its gap is 0."""
    rest = torch.logspace(-35, 5, rows, dtype=torch.float64)
    certain = rest < 1
    gap = torch.where(certain, 0.0, -torch.logspace(-6, 3, rows, dtype=torch.float64))
    return Sums(torch.zeros(rows, dtype=dtype), gap.to(dtype), rest.to(dtype), (-2 * rest).to(dtype))


def make_tokens(dtype, rows):
    """Old log-probabilities, advantages, replayed, mask."""
    old, advantage = torch.randn(2, rows, dtype=dtype)
    return old - 2, advantage, torch.rand(rows) < 0.3, torch.rand(rows) < 0.8


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
