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
    counts, stratum = np.unique(units.count, return_inverse=True)
    with np.errstate(divide="ignore"):  # a prompt may have a count of 0, and so a weight of 0
        of_counts = log_weight(counts)
    if not np.isfinite(of_counts).any():  # prompts that nobody has solved yet: all are alike
        of_counts = np.zeros_like(of_counts)
    return Priority(of_counts, stratum)
