"""Arguments and results of surrogates.

`surrogate(tokens, options)` gets the tokens of whole answers and returns the objective to maximise; torch
differentiates it. It must be positively homogeneous in the advantage, which carries the weights of tokens: that of
tokens of another term, such as replayed ones, is 0.

Declarations by `needs`:

    all_rows        It is not homogeneous: it gets answers without an advantage, too, and the weights of tokens apart,
                    in `weight`, by which it multiplies its values.
    coupled         It compares the answers of a group: before each optimiser step, the trainer subtracts the group's
                    mean of A - beta2 S from the advantages A, with S the log-ratio of an answer. That takes a pass
                    through the model unless every S is 0.
    fused           It is the objective of `exgrpo.kernels.linear_policy_loss`, which computes it with its gradient.
    bounds_weights  It gives clipped tokens a gradient.

Estimates of the KL divergence to a reference policy come from the tokens that the policy wrote. With d = log reference
- log policy of a token, the means of k1 and k3 are the divergence, and that of k2 is it up to third order (Schulman,
"Approximating KL divergence", 2020). As terms of a loss they differ in their gradients, on tokens that the policy has
just written: that of k2 is the gradient of the divergence; that of k3 is the one of the reverse divergence; the mean of
k1's is 0, and k1 moves the policy by its noise alone. Multiplied by the importance ratio, k1 and k3 have the gradient
of the divergence, whichever policy wrote the tokens (DeepSeek-V3.2, arXiv 2512.02556).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exgrpo.kernels.inputs import PRESENT
from exgrpo.kernels.objective import MAX_LOG_RATIO, bounded_ratio
from exgrpo.train.config.objective import Bounds, MethodOptions

ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": torch.neg,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: torch.expm1(d.clamp(max=MAX_LOG_RATIO)) - d,
}
"""Estimates of the divergence as functions of d, differentiable in the policy's log-probs."""


@dataclass(frozen=True, eq=False)
class RatioTokens:
    """The T tokens of N answers, one answer after the other.

    Attributes:
        log_prob: [T] log-probs of the policy, in nats, with their gradient.
        old_log_prob: [T] log-probs of the policy that ratios refer to; inf: the present one.
        advantage: [T].
        lengths: [N] int64, tokens of each answer.
        weight: [T] weight of the objective if `needs(all_rows=True)`; else 1.
        bounds: of ratios, (1 - eps_low, 1 + eps_high); None: ratios are not clipped in this step.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantage: Tensor
    lengths: Tensor
    weight: Tensor
    bounds: Bounds | None = None

    @property
    def log_ratio(self) -> Tensor:
        """[T] log pi / pi_old."""
        return self.log_prob - torch.where(self.old_log_prob == PRESENT, self.log_prob.detach(), self.old_log_prob)

    @property
    def ratio(self) -> Tensor:
        """[T] pi / pi_old, at most e^20."""
        return bounded_ratio(self.log_ratio)

    def sums(self, values: Tensor) -> Tensor:
        """[N] sums of [T] values over each answer; the same bits on every run, on a GPU too."""
        return torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True)

    def means(self, values: Tensor) -> Tensor:
        """[N] means of [T] values over each answer."""
        return self.sums(values) / self.lengths

    def over_tokens(self, values: Tensor) -> Tensor:
        """[T] the value of each token's answer, from [N] values."""
        return values.repeat_interleave(self.lengths, output_size=len(self.log_prob))


@dataclass(frozen=True, eq=False)
class Objective:
    """The objective of the tokens.

    Attributes:
        value: [T] or [N]; its sum is maximised.
        ratio: [T] importance ratio of each token, for metrics.
        clipped: [T] bool, tokens whose ratio is replaced by a bound.
    """

    value: Tensor
    ratio: Tensor
    clipped: Tensor


SurrogateFunction = Callable[[RatioTokens, MethodOptions], Objective]


def clip(ratio: Tensor, advantage: Tensor, bounds: Bounds | None) -> tuple[Tensor, Tensor]:
    """Return min(w A, clip(w) A), and True where the bound was the smaller one; any shape."""
    value = ratio * advantage
    if bounds is None:
        return value, torch.zeros_like(value, dtype=torch.bool)
    bounded = ratio.clamp(*bounds) * advantage
    return torch.minimum(value, bounded), bounded < value
