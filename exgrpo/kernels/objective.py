"""The policy objective of one token and its derivative, shared by all backends.

ExGRPO (arXiv 2510.02245), mixed-policy objective: fresh tokens follow the clipped surrogate, replayed tokens the
shaped importance ratio.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios count as at most this much: exp stays finite, and beyond it the ratio has no gradient."""


class Objective(NamedTuple):
    """The objective (to be maximised) of each token; every field has the tokens' shape."""

    value: Tensor
    coefficient: Tensor
    """Derivative of ``value`` with respect to the token's log-probability."""
    ratio: Tensor
    clipped: Tensor
    """Bool: the minimum picked the clipped, constant branch."""


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), the exponent cut off at MAX_LOG_RATIO."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def policy_objective(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    replayed: Tensor | None,
    clip: tuple[float, float] | None,
    beta: float | None,
) -> Objective:
    """Objective and derivative of every token. All tensors have one shape, ``replayed`` is bool or None."""
    log_ratio = log_prob - old_log_prob
    ratio = bounded_ratio(log_ratio)
    value = ratio * advantage
    coefficient = value.masked_fill(log_ratio > MAX_LOG_RATIO, 0)
    clipped = torch.zeros_like(ratio, dtype=torch.bool)
    if clip is not None:
        low, high = 1 - clip[0], 1 + clip[1]
        clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
        if replayed is not None:
            clipped &= ~replayed
        value = torch.where(clipped, ratio.clamp(low, high) * advantage, value)
        coefficient = coefficient.masked_fill(clipped, 0)
    if replayed is not None and beta is not None:
        # f(w) = w / (w + beta) = sigmoid(log w - log beta), hence df / dlog w = f (1 - f): no exponential, no bound.
        logit = log_ratio - math.log(beta)
        shaped = advantage * torch.sigmoid(logit)
        value = torch.where(replayed, shaped, value)
        coefficient = torch.where(replayed, shaped * torch.sigmoid(-logit), coefficient)
    return Objective(value, coefficient, ratio, clipped)


def token_objective(
    log_prob: Tensor,
    entropy: Tensor | None,
    old_log_prob: Tensor,
    advantage: Tensor,
    replayed: Tensor | None,
    mask: Tensor | None,
    clip: tuple[float, float] | None,
    beta: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The objective of tokens [T] whose log-probabilities are known; ``mask`` False leaves a position out.

    Returns the float64 sums of objectives, entropies and tokens [3]; log-probability, entropy, ratio and clipped
    [4, T], 0 where left out; and the derivatives of the objectives [T].
    """
    dtype = log_prob.dtype
    entropy = torch.zeros_like(log_prob) if entropy is None else entropy
    tokens = [values.to(dtype) for values in (log_prob, old_log_prob, advantage, entropy)]
    if mask is not None:
        # Whatever stands at positions left out, NaN and inf included, is replaced before any arithmetic.
        tokens = [values.masked_fill(~mask, 0) for values in tokens]
    log_prob, old_log_prob, advantage, entropy = tokens
    value, coefficient, ratio, clipped = policy_objective(log_prob, old_log_prob, advantage, replayed, clip, beta)
    counted = torch.ones_like(ratio) if mask is None else mask
    sums = torch.stack([values.sum(dtype=torch.float64) for values in (value, entropy, counted)])
    if mask is not None:
        ratio = ratio.masked_fill(~mask, 0)
    return sums, torch.stack((log_prob, entropy, ratio, clipped.to(dtype))), coefficient
