"""The loss of a micro-batch: its terms, and the way to it from log-probs.

`exgrpo.kernels.linear_policy_loss` computes the clipped surrogate with its gradient at once. Other surrogates, and a
divergence to a reference, take the log-probs of `linear_log_prob` and find their gradient by torch, which costs one
more product of the head's size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from exgrpo.kernels import LogProb, PolicyLoss, policy_loss
from exgrpo.train.experience.contract import Term
from exgrpo.train.objective.ratios import RatioTokens, Surrogate, SurrogateOptions, divergence
from exgrpo.train.objective.settings import ObjectiveConfig
from exgrpo.train.objective.surrogate import clipped
from exgrpo.train.policy.batch import MicroBatch, MiniBatch


@dataclass(frozen=True)
class LossTerms:
    """How the loss of a micro-batch is formed; the same for all micro-batches of a mini-batch.

    Attributes:
        clip: bounds of ratios, or None.
        beta: of the shaping of replayed tokens; None: their plain ratio.
        as_fresh: replayed tokens have the term of fresh ones.
        entropy_coef: weight of the sum of entropies.
        normalizer: divisor of the summed token objectives.
        temperature: of the policy.
        surrogate: of fresh tokens.
        dual_clip: see `SurrogateOptions`.
        kl: estimator of the divergence to the reference.
        kl_coef: weight of the sum of its estimates.
        kl_corrected: multiply them by the importance ratios.
    """

    clip: tuple[float, float] | None
    beta: float | None
    as_fresh: bool
    entropy_coef: float
    normalizer: float
    temperature: float
    surrogate: Surrogate = clipped
    dual_clip: float = 3.0
    kl: str = "k3"
    kl_coef: float = 0.0
    kl_corrected: bool = True

    @classmethod
    def of(
        cls,
        objective: ObjectiveConfig,
        minibatch: MiniBatch,
        surrogate: Surrogate,
        *,
        clip: bool,
        term: Term,
        ranks: int,
        temperature: float,
    ) -> "LossTerms":
        """Those of a mini-batch; `surrogate` is the one that the objective names, `term` that of replayed tokens.

        The means of entropies and divergences are over the mini-batch's tokens, whatever the objectives are divided by.
        DeepSpeed averages gradients over ranks: hence normalizer / ranks.
        """
        return cls(
            clip=objective.clip if clip else None,
            beta=objective.beta if term == "shaped" else None,
            as_fresh=term == "clipped",
            entropy_coef=objective.entropy_coef * minibatch.normalizer / minibatch.tokens,
            normalizer=minibatch.normalizer / ranks,
            temperature=temperature,
            surrogate=surrogate,
            dual_clip=objective.dual_clip,
            kl=objective.kl,
            kl_coef=objective.kl_coef * minibatch.normalizer / max(minibatch.fresh_tokens, 1),
            kl_corrected=objective.kl_corrected,
        )

    @property
    def fused(self) -> bool:
        """Whether `linear_policy_loss` computes this loss."""
        return getattr(self.surrogate, "fused", False) and self.kl_coef == 0

    @property
    def bounds_weights(self) -> bool:
        """Whether clipped tokens have a gradient, too."""
        return getattr(self.surrogate, "bounds_weights", False)

    @property
    def options(self) -> SurrogateOptions:
        """What the surrogate may look at."""
        bounds = None if self.clip is None else (1 - self.clip[0], 1 + self.clip[1])
        return SurrogateOptions(bounds, self.dual_clip)


def loss_of_log_probs(scored: LogProb, batch: MicroBatch, terms: LossTerms) -> PolicyLoss:
    """The loss of a micro-batch whose log-probs and entropies are known, with their gradients."""
    counted = batch.target.flatten() >= 0

    def of_tokens(values: Tensor) -> Tensor:
        """[T] of the policy's response tokens, row by row."""
        return values.flatten()[counted]

    def by_target(values: Tensor) -> Tensor:
        """[T] back to the shape of the target."""
        return values.new_zeros(counted.shape).masked_scatter(counted, values).view(batch.target.shape)

    log_prob, entropy, old_log_prob, advantage, replayed = map(
        of_tokens, (scored.log_prob, scored.entropy, batch.old_log_prob, batch.advantage, batch.replayed)
    )
    apart = replayed & (not terms.as_fresh)
    tokens = RatioTokens(log_prob, old_log_prob, advantage.masked_fill(apart, 0), batch.lengths)
    of_fresh = terms.surrogate(tokens, terms.options)
    of_replayed = policy_loss(
        log_prob, old_log_prob, advantage, replayed=apart, clip=None, beta=terms.beta, mask=apart, normalizer=1.0
    )
    total = of_fresh.value.sum() - of_replayed.loss + terms.entropy_coef * entropy.sum()
    if batch.reference_log_prob is not None:
        estimates = divergence(terms.kl, log_prob, of_tokens(batch.reference_log_prob))
        estimates = estimates * tokens.ratio if terms.kl_corrected else estimates
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
