"""Difficulty of questions for the current policy, from graded groups: success counts and bands.

Counts are numbers of successes, or come from continuous rewards (arXiv 2510.02245, section 5.3).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from exgrpo.train.common.records import Mask
from exgrpo.train.common.step_batch import Doubles, Ints, StepBatch
from exgrpo.train.common.success import EPSILON, is_success
from exgrpo.train.config.objective import Band


class Evidence(NamedTuple):
    """Results of the G groups of a batch under the current policy.

    Attributes:
        successes: [G] m, successes among the answers that count.
        rows: [G] F, the number of answers that count.
        rewards: rewards of these answers, in the order of their groups.
    """

    successes: Ints
    rows: Ints
    rewards: Doubles

    @property
    def solved(self) -> Mask:
        """[G] True if every row is a success, and there are at least two."""
        # One row is too little to retire a question for good: with K = 2 a mixed group has only one fresh row.
        return (self.rows >= 2) & (self.successes == self.rows)


def count_successes(batch: StepBatch, success: float, *, count_replayed: bool = False) -> Evidence:
    """Count the successes of each group.

    Replayed rows are no evidence of the current policy, so only fresh ones count unless `count_replayed`. A row
    without tokens is never a success.
    """
    counts = batch.fresh | count_replayed
    right = counts & (batch.length > 0) & is_success(batch.reward, success)
    successes, rows = (np.bincount(batch.group[of], minlength=batch.groups) for of in (right, counts))
    return Evidence(successes, rows, batch.reward[counts])


def success_counts(shown: Evidence, samples: int) -> Doubles:
    """[G] success counts on the scale of K = `samples`: k = K m / F in 0..K, not rounded; 0 without rows.

    Equal fractions give equal numbers, whatever their F.
    """
    return samples * shown.successes / np.maximum(shown.rows, 1)


def deviation_counts(shown: Evidence, samples: int) -> Doubles:
    """[G] counts for continuous rewards, from their spread (arXiv 2510.02245, section 5.3).

    round(K * (sigma_q - min) / max(max - min, eps)), sigma_q the standard deviation of a group's counted rewards, min
    and max over the groups given (those of one step), rounded half up: 0..K.
    """
    if not len(shown.rows):
        return np.empty(0)
    sigma = np.array([np.std(of_group) for of_group in np.split(shown.rewards, np.cumsum(shown.rows)[:-1])])
    scaled = samples * (sigma - sigma.min()) / max(sigma.max() - sigma.min(), EPSILON)
    return np.floor(scaled + 0.5)


BANDS: dict[Band, Callable[[Doubles, int], Mask]] = {
    "all": lambda count, samples: np.ones(len(count), bool),
    "easy": lambda count, samples: (3 * samples <= 4 * count) & (count < samples),
    "medium": lambda count, samples: (samples < 4 * count) & (4 * count <= 3 * samples),
    "hard": lambda count, samples: (count > 0) & (4 * count <= samples),
}
"""Masks of success counts of K = `samples` within a band, by the name in `objective.train_on`.

Bands of the preliminary study (arXiv 2510.02245). easy: [75, 100) %, medium: (25, 75] %, hard: (0, 25] %. Exactly 75 %
is in two of them, as the paper has it; each of its runs trains on one band. all: always.
"""
