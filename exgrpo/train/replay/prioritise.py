"""Sampling weights for replay: functions `(candidates, options) -> Priority`."""

from collections.abc import Callable

import numpy as np

from exgrpo.train.common.functions import needs
from exgrpo.train.common.step_batch import Doubles
from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.replay.candidates import Candidates, Priority

NEXT = 1e3
"""Nats between two ranks: the higher one is exhausted before the lower one is drawn from."""
SMALLEST = 1e-6
"""Added to an advantage or a reward, so that an answer with one of 0 has a weight, too."""


def gaussian(candidates: Candidates, options: MethodOptions) -> Priority:
    """exp(-(k - mu K)^2 / (2 sigma^2)), sigma in counts: medium difficulty is likeliest.

    ExGRPO, arXiv 2510.02245, section 3.2; `uniform`, `linear`, `sqrt` and `linear_clip` are its alternatives.
    """
    of = options.experience
    return _by_count(candidates, lambda k: -((k - of.mu * options.samples) ** 2) / (2 * of.sigma**2))


def uniform(candidates: Candidates, options: MethodOptions) -> Priority:
    """1 for each success count that occurs."""
    return _by_count(candidates, lambda k: np.zeros_like(k))


def linear(candidates: Candidates, options: MethodOptions) -> Priority:
    """k / K: easy questions are likelier."""
    return _by_count(candidates, lambda k: np.log(k / options.samples))


def sqrt(candidates: Candidates, options: MethodOptions) -> Priority:
    """sqrt(k / K): easy questions are somewhat likelier."""
    return _by_count(candidates, lambda k: 0.5 * np.log(k / options.samples))


def linear_clip(candidates: Candidates, options: MethodOptions) -> Priority:
    """min(k / K, 1/2): hard questions are less likely."""
    return _by_count(candidates, lambda k: np.log(np.minimum(k / options.samples, 0.5)))


def _by_count(candidates: Candidates, log_weight: Callable[[Doubles], Doubles]) -> Priority:
    """Weights of success counts, which are strata: questions with the same count are equally likely.

    Args:
        candidates: at least one.
        log_weight: function of the success counts k that occur.
    """
    counts, stratum = np.unique(candidates.count, return_inverse=True)
    with np.errstate(divide="ignore"):  # a prompt may have a count of 0, and so a weight of 0
        of_counts = log_weight(counts)
    if not np.isfinite(of_counts).any():  # no prompt has been solved yet: all are alike
        of_counts = np.zeros_like(of_counts)
    return Priority(of_counts, stratum)


def random(candidates: Candidates, options: MethodOptions) -> Priority:
    """Equal weights (Arnal et al., arXiv 2604.08706; the ablation of ExGRPO)."""
    return Priority()


def advantage(candidates: Candidates, options: MethodOptions) -> Priority:
    """|A|^(1/2) of the advantage in the group that the answer was written in (arXiv 2606.04560)."""
    return Priority(0.5 * np.log(np.abs(candidates.advantage) + SMALLEST))


def freshness(candidates: Candidates, options: MethodOptions) -> Priority:
    """(|reward| exp(-age / age_scale))^0.6 (FreshPER, arXiv 2604.16918: as its code where there is no critic)."""
    log_weight = np.log(np.abs(candidates.reward) + SMALLEST)
    log_weight -= candidates.age / options.experience.age_scale
    return Priority(0.6 * log_weight)


@needs(drift=True)
def headroom(candidates: Candidates, options: MethodOptions) -> Priority:
    """The highest `headroom` first among the answers whose drift is at most `drift`; the others come last.

    Headroom-Drift, arXiv 2609.03941.
    """
    _, rank = np.unique(candidates.headroom, return_inverse=True)
    return Priority(np.where(candidates.drift <= options.experience.drift, NEXT * rank, -np.inf))


def newest(candidates: Candidates, options: MethodOptions) -> Priority:
    """Last in, first out: a younger step is exhausted before an older one is drawn from (POPO, arXiv 2606.01281)."""
    stratum = candidates.step - candidates.step.min()
    return Priority(NEXT * np.arange(stratum.max() + 1), stratum)


def oldest(candidates: Candidates, options: MethodOptions) -> Priority:
    """First in, first out: an older step is exhausted before a younger one is drawn from (M2PO, arXiv 2510.01161)."""
    stratum = candidates.step - candidates.step.min()
    return Priority(-NEXT * np.arange(stratum.max() + 1), stratum)


def middle(candidates: Candidates, options: MethodOptions) -> Priority:
    """By |p - 1/2| of the latest pass rate p, the nearest first (prompt replay, arXiv 2603.21177)."""
    return _by_count(candidates, lambda k: -NEXT * options.samples * np.abs(k / options.samples - 0.5))


def least_used(candidates: Candidates, options: MethodOptions) -> Priority:
    """Least replayed first, so that all take turns (Re:Max, package remax-rl)."""
    return Priority(-NEXT * np.arange(candidates.replays.max() + 1), candidates.replays)
