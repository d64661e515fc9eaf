"""The functions of `chunks.softmax` and `objective` over tokens and responses, as one compiled kernel each."""

import torch
from torch import Tensor

from exgrpo.kernels.chunks.softmax import PolicyRows, RowTerms, Statistics, Sums
from exgrpo.kernels.extension import OPERATORS
from exgrpo.kernels.inputs import LogProb, PolicyTokens, ScoredTokens, Surrogate
from exgrpo.kernels.objective import TokenObjective


def finished(sums: Sums) -> tuple[Statistics, LogProb]:
    anchor, gap, rest, moment = sums
    mean, log_prob, entropy = OPERATORS.finish(gap.contiguous(), rest.contiguous(), moment.contiguous())
    return Statistics(anchor, gap, rest, mean), LogProb(log_prob, entropy)


def policy_rows(
    sums: Sums, tokens: PolicyTokens, terms: RowTerms, temperature: Tensor | None, out: Tensor
) -> PolicyRows:
    like = sums.gap.dtype
    results = OPERATORS.policy_rows(
        sums.gap.contiguous(),
        sums.rest.contiguous(),
        sums.moment.contiguous(),
        *_vectors(tokens, like),
        _vector(temperature, like),
        terms.normalizer.to(like),
        *_numbers(terms.surrogate),
        terms.entropy_coef,
        terms.plain,
    )
    return PolicyRows(*out.copy_(results))


def token_objective(scored: ScoredTokens, surrogate: Surrogate) -> TokenObjective:
    like = scored.log_prob.dtype
    results = OPERATORS.token_objective(
        _vector(scored.log_prob, like),
        _vector(scored.entropy, like),
        *_vectors(scored.policy, like),
        _vector(scored.mask, torch.bool),
        *_numbers(surrogate),
    )
    return TokenObjective(*results)


def centre_groups(reward: Tensor, group: Tensor, scale_by_std: bool) -> Tensor:
    return OPERATORS.centre_groups(_vector(reward, torch.float64), _vector(group, torch.int64), scale_by_std)


def segment_mean(values: Tensor, counted: Tensor, offsets: Tensor) -> Tensor:
    return OPERATORS.segment_mean(values.contiguous(), counted.contiguous(), _vector(offsets, torch.int64))


def _vector(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(dtype).contiguous()


def _vectors(tokens: PolicyTokens, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    return _vector(tokens.old_log_prob, dtype), _vector(tokens.advantage, dtype), _vector(tokens.replayed, torch.bool)


def _numbers(surrogate: Surrogate) -> tuple[float | None, float | None, float | None]:
    low, high = surrogate.bounds or (None, None)
    return low, high, surrogate.beta
