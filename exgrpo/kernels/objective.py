"""Objective, advantages and means of segments in plain PyTorch.

The objective is that of ExGRPO (arXiv 2510.02245), mixed-policy: fresh tokens follow the clipped surrogate, replayed
tokens the shaped importance ratio. Sums over ragged segments give the same bits on every run: there are no scattered
atomic additions.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from exgrpo.kernels.inputs import PRESENT, PolicyTokens, ScoredTokens, Surrogate

MAX_LOG_RATIO = 20.0
"""Log-ratios count as at most this much: exp stays finite, and beyond it the ratio has no gradient."""
STD_EPSILON = 1e-6
"""Added to a standard deviation before it divides."""


class ObjectiveTerms(NamedTuple):
    """The objective (to be maximised) of each token; every field has the tokens' shape."""

    value: Tensor
    coefficient: Tensor
    """Derivative of ``value`` with respect to the token's log-probability."""
    ratio: Tensor
    clipped: Tensor
    """Bool: the minimum picked the clipped, constant branch."""


class TokenObjective(NamedTuple):
    """The objective of tokens [T] whose log-probabilities are known, and its derivative."""

    sums: Tensor
    """[3] float64: of the objectives, of the entropies, and the number of tokens that take part."""
    per_token: Tensor
    """[4, T]: log-probability, entropy, ratio and clipped; 0 where a token is left out."""
    coefficient: Tensor
    """[T]: derivatives of the objectives with respect to the log-probabilities."""


def sum_rows(terms: Tensor) -> Tensor:
    """Sum of ``terms`` [n, ...] over the first dimension; on a CPU it overwrites them.

    It has the same bits for any number of threads: torch cuts long sums into a part for each thread, and here there are
    none but those of two terms.
    """
    while terms.is_cpu and len(terms) > 1:
        half = len(terms) // 2
        terms[:half] += terms[-half:]
        terms = terms[: len(terms) - half]
    return terms.sum(0)


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), the exponent cut off at MAX_LOG_RATIO."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def policy_objective(log_prob: Tensor, tokens: PolicyTokens, surrogate: Surrogate) -> ObjectiveTerms:
    """Objective and derivative of every token. All tensors have the shape of ``log_prob``."""
    old_log_prob, advantage, replayed = tokens
    log_ratio = log_prob - torch.where(old_log_prob == PRESENT, log_prob, old_log_prob)
    ratio = bounded_ratio(log_ratio)
    value = ratio * advantage
    coefficient = value.masked_fill(log_ratio > MAX_LOG_RATIO, 0)
    clipped = torch.zeros_like(ratio, dtype=torch.bool)
    if surrogate.bounds is not None:
        low, high = surrogate.bounds
        clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
        if replayed is not None:
            clipped &= ~replayed
        value = torch.where(clipped, ratio.clamp(low, high) * advantage, value)
        coefficient = coefficient.masked_fill(clipped, 0)
    if replayed is not None and surrogate.beta is not None:
        # f(w) = w / (w + beta) = sigmoid(log w - log beta), hence df / dlog w = f (1 - f): no exponential, no bound.
        logit = log_ratio - math.log(surrogate.beta)
        shaped = advantage * torch.sigmoid(logit)
        value = torch.where(replayed, shaped, value)
        coefficient = torch.where(replayed, shaped * torch.sigmoid(-logit), coefficient)
    return ObjectiveTerms(value, coefficient, ratio, clipped)


def token_objective(scored: ScoredTokens, surrogate: Surrogate) -> TokenObjective:
    """The objective of tokens whose log-probabilities are known."""
    log_prob, entropy, (old_log_prob, advantage, replayed), mask = scored
    dtype = log_prob.dtype
    entropy = torch.zeros_like(log_prob) if entropy is None else entropy
    values = [value.to(dtype) for value in (log_prob, old_log_prob, advantage, entropy)]
    if mask is not None:
        # Whatever stands at positions left out, NaN and inf included, is replaced before any arithmetic.
        values = [value.masked_fill(~mask, 0) for value in values]
    log_prob, old_log_prob, advantage, entropy = values
    tokens = PolicyTokens(old_log_prob, advantage, replayed)
    value, coefficient, ratio, clipped = policy_objective(log_prob, tokens, surrogate)
    counted = torch.ones_like(ratio) if mask is None else mask
    sums = sum_rows(torch.stack([terms.double() for terms in (value, entropy, counted)], 1))
    if mask is not None:
        ratio = ratio.masked_fill(~mask, 0)
    return TokenObjective(sums, torch.stack((log_prob, entropy, ratio, clipped.to(dtype))), coefficient)


def scale(values: Tensor, factor: Tensor) -> None:
    """Multiply values in place by a factor without dimensions; for 1 they stay as they are."""
    if values.device.type != "cpu" or factor != 1:
        values.mul_(factor)


def segment_mean(values: Tensor, counted: Tensor, offsets: Tensor) -> Tensor:
    """Mean of the counted values [T] (bool [T]) of each segment [offsets[i], offsets[i + 1]); 0 if it has none."""
    offsets = offsets.long()

    def total(data: Tensor) -> Tensor:
        return torch.segment_reduce(data.double(), "sum", offsets=offsets, axis=0, initial=0, unsafe=True)

    return (total(values.masked_fill(~counted, 0)) / total(counted).clamp(min=1)).to(values.dtype)


def centre_groups(reward: Tensor, group: Tensor, scale_by_std: bool) -> Tensor:
    """Reward [N] minus the mean of its group, in float64, divided by the sample deviation if asked for."""
    order = group.argsort(stable=True)
    _, counts = group[order].unique_consecutive(return_counts=True)

    def mean(data: Tensor) -> Tensor:
        sums = torch.segment_reduce(data, "sum", lengths=counts, axis=0, initial=0, unsafe=True)
        return sums / counts

    def over_members(data: Tensor) -> Tensor:
        return data.repeat_interleave(counts)

    sorted_reward = reward.double()[order]
    centred = sorted_reward - over_members(mean(sorted_reward))
    if scale_by_std:
        variance = mean(centred.square()) * counts / (counts - 1).clamp(min=1)
        centred = centred / over_members(variance.sqrt() + STD_EPSILON)
    return torch.empty_like(centred).index_copy_(0, order, centred)
