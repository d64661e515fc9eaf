"""How units are drawn by weights, without replacement."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Priority(NamedTuple):
    """How likely each of N units is drawn: what a function `prioritise` gives.

    Attributes:
        log_weight: logarithms of unnormalised weights, so that no setting makes all of them vanish. Without strata [N],
            of the units; with them [S]; None: all units are alike.
        stratum: [N] int, the stratum of each unit, 0..S-1; a unit is as likely as any other one of its stratum. None:
            weights are those of units.
    """

    log_weight: Floats | None = None
    stratum: Ints | None = None


def draw(rng: np.random.Generator, size: int, wanted: int, priority: Priority) -> Ints:
    """Draw `wanted` different ones of `size` units.

    One after the other, by the weights of those that are left. With strata their numbers are multinomial and their
    members uniform without replacement; what a stratum cannot supply goes one at a time to those with room, by the
    same weights.

    Args:
        rng: generator that is advanced.
        size: N.
        wanted: at most N.
        priority: of these units.

    Returns:
        [wanted] numbers of units; with strata ordered by stratum, else in the order of their drawing.
    """
    if wanted > size:
        raise ValueError(f"wanted: {wanted} units asked for, and there are {size}")
    if wanted == 0:
        return np.empty(0, dtype=np.int64)
    if priority.log_weight is None:
        return rng.choice(size, wanted, replace=False).astype(np.int64)
    if priority.stratum is None:
        return _draw_units(rng, priority.log_weight, wanted)
    return _draw_strata(rng, priority.log_weight, priority.stratum, wanted)


def _draw_units(rng: np.random.Generator, log_weight: Floats, wanted: int) -> Ints:
    """Independent draws, of which repeated ones are made again among the units that are left.

    This is drawing one after the other: a draw that would repeat one is a draw by the weights of the others.
    """
    finite = np.exp(log_weight - log_weight.max())
    if (positive := np.count_nonzero(finite)) <= wanted:  # weights that vanish beside the largest come last
        certain = np.flatnonzero(finite)
        others = np.flatnonzero(finite == 0)
        return np.concatenate([rng.permutation(certain), rng.choice(others, wanted - positive, replace=False)])
    drawn: list[int] = []
    while len(drawn) < wanted:
        sums = np.cumsum(finite)
        places = np.searchsorted(sums, rng.random(wanted - len(drawn)) * sums[-1], side="right")
        new = list(dict.fromkeys(places.tolist()))
        finite[new] = 0
        drawn += new
    return np.array(drawn, np.int64)


def _draw_strata(rng: np.random.Generator, log_weight: Floats, stratum: Ints, wanted: int) -> Ints:
    room = np.bincount(stratum, minlength=len(log_weight))
    taken = np.minimum(rng.multinomial(wanted, _probabilities(log_weight, room)), room)
    while taken.sum() < wanted:
        taken[rng.choice(len(room), p=_probabilities(log_weight, room - taken))] += 1
    drawn = [rng.choice(np.flatnonzero(stratum == s), n, replace=False) for s, n in enumerate(taken.tolist()) if n]
    return np.concatenate(drawn).astype(np.int64)


def _probabilities(log_weights: Floats, room: npt.NDArray[np.int64]) -> Floats:
    masked = np.where(room > 0, log_weights, -np.inf)
    weights = np.exp(masked - masked.max())
    return weights / weights.sum()
