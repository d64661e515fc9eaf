"""Loss of a micro-batch: its terms, and its value and gradient from log-probs.

`exgrpo.kernels.linear_policy_loss` computes the clipped surrogate with its gradient at once. Other surrogates, and a
divergence to a reference, take the log-probs of `linear_log_prob` and find their gradient by torch, which costs one
more product of the head's size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from exgrpo.kernels import LogProb, PolicyLoss, policy_loss
from exgrpo.train.common.functions import Needs, Term
from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.policy.batch import MicroBatch, MiniBatch
from exgrpo.train.policy.ratios import ESTIMATORS, RatioTokens, SurrogateFunction
from exgrpo.train.policy.surrogate import clipped


@dataclass(frozen=True)
class LossTerms:
    """Coefficients and options of the loss, the same for all micro-batches of a mini-batch.

    Attributes:
        options: of the run.
        normalizer: divisor of the summed token objectives.
        entropy_coef: weight of the sum of entropies.
        kl_coef: weight of the sum of estimates of the divergence.
        bounded: True if ratios are clipped.
        term: of replayed tokens.
        surrogate: of fresh tokens; the one that the objective names.
    """

    options: MethodOptions
    normalizer: float
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    bounded: bool = True
    term: Term = "shaped"
    surrogate: SurrogateFunction = clipped

    @classmethod
    def from_minibatch(
        cls,
        minibatch: MiniBatch,
        options: MethodOptions,
        surrogate: SurrogateFunction,
        *,
        ranks: int,
        clip: bool,
        term: Term,
    ) -> "LossTerms":
        """Return the terms of a mini-batch on `ranks` processes, over which DeepSpeed averages gradients.

        Entropies and divergences are means over its tokens, whatever the objectives are divided by.
        """
        objective, normalizer = options.objective, minibatch.normalizer
        return cls(
            options,
            normalizer=normalizer / ranks,
            entropy_coef=objective.entropy_coef * normalizer / minibatch.tokens,
            kl_coef=objective.kl_coef * normalizer / max(minibatch.fresh_tokens, 1),
            bounded=clip,
            term=term,
            surrogate=surrogate,
        )

    @property
    def clip(self) -> tuple[float, float] | None:
        """Distances (eps_low, eps_high) of ratios from 1; None: ratios are not clipped."""
        return self.options.objective.clip if self.bounded else None

    @property
    def beta(self) -> float | None:
        """Parameter of the shaping of replayed tokens; None: their plain ratio."""
        return self.options.objective.beta if self.term == "shaped" else None

    @property
    def as_fresh(self) -> bool:
        """True if replayed tokens have the term of fresh ones."""
        return self.term == "clipped"

    @property
    def fused(self) -> bool:
        """True if `linear_policy_loss` computes this loss."""
        return Needs.of(self.surrogate).fused and self.kl_coef == 0


def loss_of_log_probs(scored: LogProb, batch: MicroBatch, terms: LossTerms) -> PolicyLoss:
    """Return the loss of a micro-batch from its log-probs and entropies, with their gradients."""
    objective, counted = terms.options.objective, batch.target.flatten() >= 0

    def of_tokens(values: Tensor) -> Tensor:
        return values.flatten()[counted]

    def by_target(values: Tensor) -> Tensor:
        return values.new_zeros(counted.shape).masked_scatter(counted, values).view(batch.target.shape)

    log_prob, entropy, old_log_prob, advantage, replayed = map(
        of_tokens, (scored.log_prob, scored.entropy, batch.old_log_prob, batch.advantage, batch.replayed)
    )
    apart = replayed & (not terms.as_fresh)
    weight = advantage.new_ones(()).expand_as(advantage) if batch.weight is None else of_tokens(batch.weight)
    of_surrogate = weight if batch.weight is None else weight.masked_fill(apart, 0)
    bounds = None if terms.clip is None else (1 - terms.clip[0], 1 + terms.clip[1])
    tokens = RatioTokens(log_prob, old_log_prob, advantage.masked_fill(apart, 0), batch.lengths, of_surrogate, bounds)
    of_fresh = terms.surrogate(tokens, terms.options)
    weighted = advantage if batch.weight is None else advantage * weight
    of_replayed = policy_loss(
        log_prob, old_log_prob, weighted, replayed=apart, clip=None, beta=terms.beta, mask=apart, normalizer=1.0
    )
    total = of_fresh.value.sum() - of_replayed.loss + terms.entropy_coef * entropy.sum()
    if batch.reference_log_prob is not None:
        estimates = ESTIMATORS[objective.kl](of_tokens(batch.reference_log_prob) - log_prob)
        estimates = estimates * tokens.ratio if objective.kl_corrected else estimates
        total = total - terms.kl_coef * estimates.masked_fill(replayed, 0).sum()
    ratio = torch.where(apart, of_replayed.ratio, of_fresh.ratio.detach())
    bounded = (of_fresh.clipped & ~apart).to(log_prob.dtype)
    return PolicyLoss(
        -total / terms.normalizer,
        scored.log_prob.detach(),
        scored.entropy.detach(),
        by_target(ratio),
        by_target(bounded),
    )
