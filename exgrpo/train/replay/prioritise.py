"""Sampling weights for replay: functions `(units, options) -> Priority`."""

from collections.abc import Callable

import numpy as np

from exgrpo.train.common.step_batch import Doubles
from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.replay.candidates import Priority, Units

NEXT = 1e3
"""Nats between two ranks: the higher one is exhausted before the lower one is drawn from."""
SMALLEST = 1e-6
"""Added to an advantage or a reward, so that an answer with one of 0 has a weight, too."""


def gaussian(units: Units, options: MethodOptions) -> Priority:
    """exp(-(k - mu K)^2 / (2 sigma^2)), sigma in counts: medium difficulty is likeliest.

    ExGRPO, arXiv 2510.02245, section 3.2; `uniform`, `linear`, `sqrt` and `linear_clip` are its alternatives.
    """
    of = options.experience
    return _by_count(units, lambda k: -((k - of.mu * options.samples) ** 2) / (2 * of.sigma**2))


def uniform(units: Units, options: MethodOptions) -> Priority:
    """1 for each success count that occurs."""
    return _by_count(units, lambda k: np.zeros_like(k))


def linear(units: Units, options: MethodOptions) -> Priority:
    """k / K: easy questions are likelier."""
    return _by_count(units, lambda k: np.log(k / options.samples))


def sqrt(units: Units, options: MethodOptions) -> Priority:
    """sqrt(k / K): easy questions are somewhat likelier."""
    return _by_count(units, lambda k: 0.5 * np.log(k / options.samples))


def linear_clip(units: Units, options: MethodOptions) -> Priority:
    """min(k / K, 1/2): hard questions are less likely."""
    return _by_count(units, lambda k: np.log(np.minimum(k / options.samples, 0.5)))


def _by_count(units: Units, log_weight: Callable[[Doubles], Doubles]) -> Priority:
    """Weights of success counts, which are strata: questions with the same count are equally likely.

    Args:
        units: at least one.
        log_weight: function of the success counts k that occur.
    """
    counts, stratum = np.unique(units.count, return_inverse=True)
    with np.errstate(divide="ignore"):  # a prompt may have a count of 0, and so a weight of 0
        of_counts = log_weight(counts)
    if not np.isfinite(of_counts).any():  # no prompt has been solved yet: all are alike
        of_counts = np.zeros_like(of_counts)
    return Priority(of_counts, stratum)


def random(units: Units, options: MethodOptions) -> Priority:
    """Equal weights (Arnal et al., arXiv 2604.08706; the ablation of ExGRPO)."""
    return Priority()


def advantage(units: Units, options: MethodOptions) -> Priority:
    """|A|^(1/2) of the advantage in the group that the answer was written in (arXiv 2606.04560)."""
    return Priority(0.5 * np.log(np.abs(units.advantage) + SMALLEST))


def freshness(units: Units, options: MethodOptions) -> Priority:
    """(|reward| exp(-age / age_scale))^0.6 (FreshPER, arXiv 2604.16918: as its code where there is no critic)."""
    log_weight = np.log(np.abs(units.reward) + SMALLEST)
    log_weight -= units.age / options.experience.age_scale
    return Priority(0.6 * log_weight)


def newest(units: Units, options: MethodOptions) -> Priority:
    """Last in, first out: a younger step is exhausted before an older one is drawn from (POPO, arXiv 2606.01281)."""
    stratum = units.step - units.step.min()
    return Priority(NEXT * np.arange(stratum.max() + 1), stratum)


def oldest(units: Units, options: MethodOptions) -> Priority:
    """First in, first out: an older step is exhausted before a younger one is drawn from (M2PO, arXiv 2510.01161)."""
    stratum = units.step - units.step.min()
    return Priority(-NEXT * np.arange(stratum.max() + 1), stratum)


def middle(units: Units, options: MethodOptions) -> Priority:
    """By |p - 1/2| of the latest pass rate p, the nearest first (prompt replay, arXiv 2603.21177)."""
    return _by_count(units, lambda k: -NEXT * options.samples * np.abs(k / options.samples - 0.5))


def least_used(units: Units, options: MethodOptions) -> Priority:
    """Least replayed first, so that all take turns (Re:Max, package remax-rl)."""
    return Priority(-NEXT * np.arange(units.replays.max() + 1), units.replays)
