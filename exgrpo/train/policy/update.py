"""What an optimiser step did, summed over micro-batches and ranks."""

from dataclasses import dataclass

import torch

from exgrpo.kernels import PolicyLoss
from exgrpo.kernels.inputs import PRESENT
from exgrpo.train.distributed import World
from exgrpo.train.objective.ratios import divergence
from exgrpo.train.policy.batch import MicroBatch
from exgrpo.train.policy.loss import LossTerms
from exgrpo.train.policy.ratios import count_log_ratios
from exgrpo.train.records import Score


@dataclass(frozen=True, eq=False)
class UpdateStats:
    """What one optimiser step did, over all ranks.

    `applied` is False where the gradient norm was not finite and the step was skipped. Ratios are means over
    tokens (and the largest fresh one); `replayed_weight` is the mean of what the ratio of a replayed token is shaped
    to; a mean over no tokens is NaN. `gradient_tokens` counts those which the policy loss gives a gradient: with an
    advantage, and not clipped away. `reference_kl` is the mean divergence of fresh tokens to the reference, by the
    estimator k3; NaN without one. `log_ratios` [2, BINS] counts fresh and replayed tokens, see `ratios`.
    `scores` are those of its rows before the step, end to end, where they were asked for.
    """

    loss: float
    grad_norm: float
    applied: bool
    clip_fraction: float
    fresh_ratio: float
    fresh_ratio_max: float
    replayed_ratio: float
    replayed_weight: float
    gradient_tokens: int
    log_ratios: torch.Tensor
    scores: Score | None = None
    reference_kl: float = float("nan")


class Tally:
    """Sums over the micro-batches of one rank: loss, ratios, weights, counts of tokens and of their log-ratios."""

    def __init__(self, terms: LossTerms) -> None:
        self.terms = terms
        self.sums: list[torch.Tensor] = []
        self.log_ratios: list[torch.Tensor] = []

    def add(self, batch: MicroBatch, result: PolicyLoss) -> None:
        """Take in a micro-batch; one without rows weighs nothing."""
        active = batch.target >= 0
        replayed, fresh = active & batch.replayed, active & ~batch.replayed
        ratio = result.ratio.double()
        weight = ratio if self.terms.beta is None else ratio / (ratio + self.terms.beta)
        clipped = result.clipped != 0
        lost = clipped & (not self.terms.bounds_weights)
        zero = ratio.new_zeros(())
        divergences = self._divergences(batch, result)
        self.sums.append(
            torch.stack(
                [
                    result.loss.detach().double(),
                    fresh.sum().double(),
                    replayed.sum().double(),
                    (fresh & clipped).sum().double(),
                    torch.where(fresh, ratio, zero).sum(),
                    torch.where(replayed, ratio, zero).sum(),
                    torch.where(replayed, weight, zero).sum(),
                    (active & (batch.advantage != 0) & ~lost).sum().double(),
                    zero if divergences is None else torch.where(fresh, divergences, zero).sum(),
                    torch.where(fresh, ratio, zero).amax(),
                ]
            )
        )
        own = batch.old_log_prob == PRESENT
        log_ratio = result.log_prob - torch.where(own, result.log_prob, batch.old_log_prob)
        self.log_ratios.append(count_log_ratios(log_ratio, batch.replayed, active))

    @staticmethod
    def _divergences(batch: MicroBatch, result: PolicyLoss) -> torch.Tensor | None:
        """Of each token to the reference; None where there is none."""
        if batch.reference_log_prob is None:
            return None
        return divergence("k3", result.log_prob.double(), batch.reference_log_prob.double())

    def stats(
        self, world: World, *, grad_norm: float | torch.Tensor, applied: bool, scores: Score | None = None
    ) -> UpdateStats:
        """What the step did, over all ranks, which call it together."""
        stacked, counts = torch.stack(self.sums).cpu(), torch.stack(self.log_ratios).sum(0).cpu()
        gathered = world.gather((torch.cat([stacked[:, :-1].sum(0), stacked[:, -1:].amax(0)]), counts))
        of_ranks = torch.stack([numbers for numbers, _ in gathered])
        sums = of_ranks[:, :-1].sum(0).tolist()
        loss, fresh, replayed, clipped, fresh_ratio, replayed_ratio, weight, gradient, kl = sums
        return UpdateStats(
            loss=loss / world.size,
            grad_norm=float(grad_norm),
            applied=applied,
            clip_fraction=clipped / fresh if fresh else float("nan"),
            fresh_ratio=fresh_ratio / fresh if fresh else float("nan"),
            fresh_ratio_max=float(of_ranks[:, -1].max()) if fresh else float("nan"),
            replayed_ratio=replayed_ratio / replayed if replayed else float("nan"),
            replayed_weight=weight / replayed if replayed else float("nan"),
            gradient_tokens=int(gradient),
            reference_kl=kl / fresh if fresh and self.terms.kl_coef else float("nan"),
            log_ratios=torch.stack([counts for _, counts in gathered]).sum(0),
            scores=scores,
        )
