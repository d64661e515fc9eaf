"""Laws over success counts: a count is drawn by its weight, and a question among those with this count."""

from collections.abc import Callable

import numpy as np

from exgrpo.train.experience.sampling import Floats, Priority
from exgrpo.train.experience.units import Units


def by_count(units: Units, log_weight: Callable[[Floats], Floats]) -> Priority:
    """The strata are the success counts that occur, in their order.

    Args:
        units: at least one.
        log_weight: of success counts k.
    """
    counts = _distinct(units.count)
    with np.errstate(divide="ignore"):  # a prompt may have a count of 0, and so a weight of 0
        of_counts = log_weight(counts)
    return Priority(of_counts, np.searchsorted(counts, units.count))


def _distinct(values: Floats) -> Floats:
    """The different values, in order: there are few, and taking them out one after the other is faster than sorting."""
    found = []
    while len(values):
        found.append(values[0])
        values = values[values != values[0]]
    return np.sort(np.array(found))
