"""Statistics of a row's softmax, and what of them its gradient is made of.

With a an anchor of the row, d_v = (z_v - a) / tau, y the target and e_y = exp(d_y), take the target out of the
sums: S = sum_{v != y} exp(d_v). Then, with Z = S + e_y and U = (sum_v exp(d_v) d_v) / Z,

    log p_y = d_y - log Z        p_y - 1 = -S / Z        H = log Z - U        log p_v + H = d_v - U

Z is computed as 1 + (S + expm1(d_y)). Anchored at the target d_y = 0 and log p_y = -log1p(S): exact to the last bit
however close p_y is to 1. Anchored at the largest logit no exponential overflows, S is at least 1 where the target is
another one, and log Z - U is a sum of two terms that are never negative. S and S * U merge over tiles and shards of the
vocabulary by addition.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from exgrpo.kernels.inputs import LogProb, PolicyTokens, Surrogate, mapped
from exgrpo.kernels.objective import policy_objective

UNDERFLOWN = -1e4
"""Stands for every d below it: exp is 0 in any dtype, and 0 * d must be 0 where d is -inf."""
LARGEST_SUM = 2.0**40
"""Of S with the target's logit as anchor, in the fused products: p_y is 1e-12 there. No exponential nears the end of
float32 or bfloat16; beyond it a row is done again from its largest logit."""


class Sums(NamedTuple):
    """Sums over each row's vocabulary without the target, all [rows]."""

    anchor: Tensor
    """a, before the temperature."""
    gap: Tensor
    """d_y <= 0."""
    rest: Tensor
    """S."""
    moment: Tensor
    """sum_{v != y} exp(d_v) d_v."""


class Statistics(NamedTuple):
    """Statistics of each row's softmax, all [rows]."""

    anchor: Tensor
    gap: Tensor
    rest: Tensor
    mean: Tensor
    """U <= 0 with the largest logit as anchor."""

    @property
    def excess(self) -> Tensor:
        """Z - 1."""
        return self.rest + torch.expm1(self.gap)


class Upstream(NamedTuple):
    """Gradient of the loss with respect to each row's log-probability (c) and entropy (h; None: zero), [rows]."""

    log_prob: Tensor
    entropy: Tensor | None

    @property
    def active(self) -> Tensor:
        """The rows whose gradient is not zero, bool [rows]."""
        active = self.log_prob != 0
        return active if self.entropy is None else active | (self.entropy != 0)

    def times(self, unit: Tensor | None) -> "Upstream":
        """Return the gradient of a multiple of the loss; None: of the loss itself."""
        return self if unit is None else mapped(self, lambda one: one * unit)

    def beyond(self, softcap: float | None) -> LogProb | None:
        """Return c and h for a pass over the vocabulary; None where no such pass is needed."""
        if self.entropy is None and softcap is None:
            return None
        return LogProb(self.log_prob, torch.zeros_like(self.log_prob) if self.entropy is None else self.entropy)


class Factors(NamedTuple):
    """Factors of a row's gradient with respect to the raw products: r * F, F over the vocabulary.

    With the upstream gradients c and h the gradient is -(c + h (d_v - U)) p_v / tau off the target and
    (c S / Z - h (d_y - U) p_y) / tau at the target, times the slope of the cap. Without entropy and cap, F is exp(d)
    itself with -S at the target, and r does the rest on the [rows, D] side of the products.
    """

    scale: Tensor
    """r [rows]."""
    at_target: Tensor
    """F at the target but for the slope of the cap, [rows]."""
    upstream: LogProb | None
    """c and h; None: F is exp(d) off the target."""


class RowTerms(NamedTuple):
    """Terms of the loss that are the same for all rows."""

    surrogate: Surrogate
    entropy_coef: float
    """Where it is not 0, the gradient of each row's entropy is -entropy_coef / normalizer."""
    normalizer: Tensor
    """Without dimensions, any dtype, on the device of the rows."""
    softcap: float | None
    """Of the logits, see `inputs.HeadOptions`."""

    @property
    def plain(self) -> bool:
        """True if F is exp(d) off the target, so that r has c in it: see `Factors`."""
        return not self.entropy_coef and self.softcap is None

    def entropy_upstream(self, like: Tensor) -> Tensor | None:
        """h, the same for all rows, shaped like a vector [rows]; None without an entropy bonus."""
        return torch.full_like(like, -self.entropy_coef) / self.normalizer if self.entropy_coef else None


class PolicyRows(NamedTuple):
    """Objective of a chunk's rows, and its gradient, all [rows]."""

    value: Tensor
    """Of the objective, to be maximised."""
    log_prob: Tensor
    entropy: Tensor
    ratio: Tensor
    clipped: Tensor
    """1 where clipping has cut the gradient off, else 0."""
    mean: Tensor
    """U."""
    coefficient: Tensor
    """c, the gradient of the loss with respect to the log-probability."""
    scale: Tensor
    at_target: Tensor


def finished(sums: Sums) -> tuple[Statistics, LogProb]:
    """Statistics, log-probabilities and entropies from the sums."""
    anchor, gap, rest, moment = sums
    statistics = Statistics(*sums)
    excess = statistics.excess
    mean = (moment + gap.exp() * gap.clamp(min=UNDERFLOWN)) / (1 + excess)
    log_z = torch.log1p(excess)
    return Statistics(anchor, gap, rest, mean), LogProb(gap - log_z, log_z - mean)


def row_factors(
    temperature: Tensor | None, softcap: float | None, statistics: Statistics, upstream: Upstream
) -> Factors:
    """The factors of rows whose upstream gradient is known."""
    scale = -1 / (1 + statistics.excess)
    if temperature is not None:
        scale = scale / temperature
    general = upstream.beyond(softcap)
    if general is None:
        return Factors(scale * upstream.log_prob, -statistics.rest, None)
    distance = statistics.gap.clamp(min=UNDERFLOWN) - statistics.mean
    at_target = general.entropy * statistics.gap.exp() * distance - statistics.rest * upstream.log_prob
    return Factors(scale, at_target, general)


def policy_rows(
    sums: Sums, tokens: PolicyTokens, terms: RowTerms, temperature: Tensor | None, out: Tensor
) -> PolicyRows:
    """The objective of rows whose sums are known, and the factors of its gradient; temperature [rows], None: 1.

    The fields are the rows of ``out`` [9, rows], of any stride between them.
    """
    statistics, (log_prob, entropy) = finished(sums)
    objective = policy_objective(log_prob, tokens, terms.surrogate)
    coefficient = -objective.coefficient / terms.normalizer
    upstream = Upstream(coefficient, terms.entropy_upstream(coefficient))
    factors = row_factors(temperature, terms.softcap, statistics, upstream)
    fields = (
        objective.value,
        log_prob,
        entropy,
        objective.ratio,
        objective.clipped.to(log_prob.dtype),
        statistics.mean,
        coefficient,
        factors.scale,
        factors.at_target,
    )
    return PolicyRows(*torch.stack(fields, out=out))
