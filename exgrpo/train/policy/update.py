"""Statistics of an optimiser step over micro-batches and ranks, and histograms of its log-ratios.

Log-ratios are counted in fixed bins, and quantiles are read from the counts, which add up to the same sum in any order:
neither packing nor the number of ranks changes a quantile. The centres of the bins are equally far apart in
asinh(log-ratio / NEAR_ZERO): a quantile is right to RESOLUTION / 2 of its own size, 1 %, and to 1e-5 nats around 0.
Beyond +-20 nats, the outermost bins count everything.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from exgrpo.kernels import PolicyLoss
from exgrpo.kernels.inputs import PRESENT
from exgrpo.train.common.distributed import World
from exgrpo.train.common.functions import Needs
from exgrpo.train.common.records import Score
from exgrpo.train.common.step_batch import Floats
from exgrpo.train.policy.batch import MicroBatch
from exgrpo.train.policy.loss import LossTerms
from exgrpo.train.policy.ratios import ESTIMATORS

RESOLUTION = 0.02
NEAR_ZERO = 1e-3
REACH = math.ceil(math.asinh(20.0 / NEAR_ZERO) / RESOLUTION)
BINS = 2 * REACH + 1
PERCENT = (1, 10, 50, 90, 99)


@dataclass(frozen=True, eq=False)
class UpdateStats:
    """Statistics of one optimiser step over all ranks.

    `applied` is False where the gradient norm was not finite and the step was skipped. Ratios are means over
    tokens (and the largest fresh one); `replayed_weight` is the mean of what the ratio of a replayed token is shaped
    to; a mean over no tokens is NaN. `gradient_tokens` counts those which the policy loss gives a gradient: with an
    advantage, not clipped away, and drawn from more than one word. `reference_kl` is the mean divergence of fresh
    tokens to the reference, by the estimator k3; NaN without one. `log_ratios` [2, BINS] counts fresh and replayed
    tokens, see `count_log_ratios`. `scores` are those of its rows before the step, end to end, where they were asked
    for. `loss_scale` is what the loss was multiplied by in fp16; else NaN.
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
    loss_scale: float = float("nan")


class Tally:
    """Sums over the micro-batches of one rank: loss, ratios, weights, counts of tokens and of their log-ratios."""

    def __init__(self, terms: LossTerms) -> None:
        self.terms = terms
        self.sums: list[torch.Tensor] = []
        self.log_ratios: list[torch.Tensor] = []

    def add(self, batch: MicroBatch, result: PolicyLoss) -> None:
        """Add a micro-batch; one without rows adds nothing."""
        active = batch.target >= 0
        replayed, fresh = active & batch.replayed, active & ~batch.replayed
        ratio = result.ratio.double()
        weight = ratio if self.terms.beta is None else ratio / (ratio + self.terms.beta)
        clipped = result.clipped != 0
        lost = clipped & (not Needs.of(self.terms.surrogate).bounds_weights)
        zero = ratio.new_zeros(())
        signal = batch.advantage if batch.weight is None else batch.weight
        learns = active & (signal != 0) & ~lost
        if batch.allowed_tokens is not None:
            learns &= batch.allowed_tokens[1].diff().view_as(learns) != 1
        reference = batch.reference_log_prob
        divergences = zero if reference is None else ESTIMATORS["k3"](reference.double() - result.log_prob.double())
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
                    learns.sum().double(),
                    torch.where(fresh, divergences, zero).sum(),
                    torch.where(fresh, ratio, zero).amax(),
                ]
            )
        )
        own = batch.old_log_prob == PRESENT
        log_ratio = result.log_prob - torch.where(own, result.log_prob, batch.old_log_prob)
        self.log_ratios.append(count_log_ratios(log_ratio, batch.replayed, active))

    def stats(
        self,
        world: World,
        *,
        grad_norm: float | torch.Tensor,
        applied: bool,
        loss_scale: float = float("nan"),
        scores: Score | None = None,
    ) -> UpdateStats:
        """Return the statistics of the step; all ranks call it together."""
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
            loss_scale=loss_scale,
        )


def count_log_ratios(log_ratio: torch.Tensor, replayed: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """Count tokens by log-ratio, without waiting for the device.

    Args:
        log_ratio: [...] nats; NaN is left out.
        replayed: bool, which can be broadcast to that.
        active: [...] bool, the tokens that count.

    Returns:
        [2, BINS] int64 on the same device: of fresh and of replayed tokens.
    """
    place = (torch.asinh(log_ratio.double() / NEAR_ZERO) / RESOLUTION).round().clamp(-REACH, REACH) + REACH
    index = place.nan_to_num().long() + BINS * replayed
    known = (active & ~log_ratio.isnan()).long()
    counts = known.new_zeros(2 * BINS)
    return counts.index_add_(0, index.flatten(), known.flatten()).view(2, BINS)


def log_ratio_quantiles(counts: npt.NDArray[np.int64]) -> dict[str, float]:
    """q01 to q99 in nats from [BINS] counts: the least value that so many percent do not exceed. NaN of no tokens."""
    reached, total = counts.cumsum(), int(counts.sum())
    ranks = [max(1, -(-percent * total // 100)) for percent in PERCENT]
    values = NEAR_ZERO * np.sinh((np.searchsorted(reached, ranks) - REACH) * RESOLUTION)
    return {f"q{p:02}": float(value) if total else math.nan for p, value in zip(PERCENT, values, strict=True)}


def mismatch_metrics(trainer: Floats, engine: Floats) -> dict[str, float]:
    """The difference of two policies on N tokens that the engine sampled, by their [N] fp32 log-probs.

    Both compute the same weights, but with other kernels, so the engine samples from a slightly different policy mu
    than the pi that the trainer differentiates. With answers that were generated a step ahead, mu is an older policy
    besides.

    With d = log pi - log mu in nats and w = exp(d):

    mean, p99, max: of |d|.
    kl: mean of -d, an unbiased estimate of KL(mu || pi) that may be negative.
    kl_k3: mean of w - 1 - d, which estimates the same, is never negative and varies less.
    ess: (sum w)^2 / (N sum w^2), the effective sample size as a fraction of the N tokens.
    """
    difference = trainer.astype(np.float64) - engine
    size = np.abs(difference)
    ratio = np.exp(difference)
    return {
        "mean": float(size.mean()),
        "p99": float(np.quantile(size, 0.99, method="inverted_cdf")),
        "max": float(size.max()),
        "kl": float(-difference.mean()),
        "kl_k3": float((np.expm1(difference) - difference).mean()),
        "ess": float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
    }
