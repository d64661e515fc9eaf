"""How units are drawn by weights, without replacement."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


ROUNDS = 8
"""After so many rounds of draws a few units outweigh all others, and what is left is drawn in another way."""
BLOCK = 256
"""Units whose weights are summed first, so that the sum of all is not made for each."""
MOST = 1 << 14
"""Draws of a round, which take 2 KiB each."""
SMALLEST = 1e-200
"""A sum of weights below which they have lost their digits."""
FARTHEST = 1e4
"""Nats by which a weight of 0 comes behind all others."""


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
    """Independent draws, of which repeated ones do not count.

    This is drawing one after the other: what is drawn and does not repeat one is drawn by the weights of the others.
    Where many repeat, those that are drawn are taken out.
    """
    weight = _weights(log_weight)
    drawn: dict[int, None] = {}
    sums = np.cumsum(weight.sum(1))
    for _ in range(ROUNDS):
        if sums[-1] < SMALLEST:
            break
        before, missing = len(drawn), min(wanted - len(drawn), MOST)
        # A block by its sum, and a unit of the block: fewer sums are made than for all units.
        block = np.searchsorted(sums, rng.random(missing) * sums[-1], side="right")
        inner = np.cumsum(weight[block], axis=1)
        places = block * BLOCK + (inner <= (rng.random(missing) * inner[:, -1])[:, None]).sum(1)
        drawn |= dict.fromkeys(places.tolist())
        if len(drawn) == wanted:
            return np.array(list(drawn), np.int64)
        if 2 * (len(drawn) - before) < missing:
            weight.reshape(-1)[list(drawn)] = 0
            sums = np.cumsum(weight.sum(1))
    found = np.array(list(drawn), np.int64)
    left = np.delete(np.arange(len(log_weight)), found)
    return np.concatenate([found, left[_race(rng, log_weight[left], wanted - len(found))]])


def _weights(log_weight: Floats) -> Floats:
    """[ceil(N / BLOCK), BLOCK] the weights beside the largest, in rows; 0 behind the last."""
    weight = np.zeros(-(-len(log_weight) // BLOCK) * BLOCK)
    largest = log_weight.max()
    if np.isfinite(largest):
        of_units = weight[: len(log_weight)]
        np.subtract(log_weight, largest, out=of_units)
        np.exp(of_units, out=of_units)
    return weight.reshape(-1, BLOCK)


def _race(rng: np.random.Generator, log_weight: Floats, wanted: int) -> Ints:
    """The same law, whatever the weights: arrival times are exponential with the weights as rates, the first win."""
    finite = np.isfinite(log_weight)
    last = log_weight[finite].min() - FARTHEST if finite.any() else 0.0
    time = np.log(rng.standard_exponential(len(log_weight))) - np.where(finite, log_weight, last)
    first = np.argpartition(time, wanted - 1)[:wanted]
    return first[np.argsort(time[first])]


def _draw_strata(rng: np.random.Generator, log_weight: Floats, stratum: Ints, wanted: int) -> Ints:
    room = np.bincount(stratum, minlength=len(log_weight))
    taken = np.minimum(rng.multinomial(wanted, _probabilities(log_weight, room)), room)
    while taken.sum() < wanted:
        taken[rng.choice(len(room), p=_probabilities(log_weight, room - taken))] += 1
    drawn = [rng.choice(np.flatnonzero(stratum == s), n, replace=False) for s, n in enumerate(taken.tolist()) if n]
    return np.concatenate(drawn).astype(np.int64)


def _probabilities(log_weights: Floats, room: npt.NDArray[np.int64]) -> Floats:
    there = room > 0
    # Weights of 0 come last, and are alike then.
    weights = log_weights if np.isfinite(log_weights[there]).any() else np.zeros(len(room))
    masked = np.where(there, weights, -np.inf)
    weights = np.exp(masked - masked.max())
    return weights / weights.sum()
