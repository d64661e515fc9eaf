"""How hard a question is for the current policy, read from a graded group: its success count and its band."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from exgrpo.train.records import Group, Trajectory
from exgrpo.train.reward.success import EPSILON, is_success


@dataclass(frozen=True)
class Evidence:
    """What a group shows about the current policy: m = `successes` of F = `rows` answers that count."""

    successes: int
    rows: int

    @property
    def solved(self) -> bool:
        """Whether every row is a success, and there are at least two.

        One row is too little to retire a question for good: with K = 2 a mixed group has only one fresh row.
        """
        return self.rows >= 2 and self.successes == self.rows

    def count(self, samples: int) -> float:
        """The success count on the scale of K = `samples`: k = K m / F in 0..K, not rounded.

        Equal fractions give equal numbers, whatever their F.
        """
        return samples * self.successes / self.rows


def counted_rows(group: Group, *, count_replayed: bool = False) -> Sequence[Trajectory]:
    """The rows that are evidence of the current policy: the fresh ones, with `count_replayed` all of them."""
    return group.rows if count_replayed else group.fresh


def count_successes(group: Group, success: float, *, count_replayed: bool = False) -> Evidence:
    """The successes among the rows that count.

    The replayed row is no evidence of the current policy: of a mixed group the m successes of the K-1 fresh rows
    count. `count_replayed` counts it too, m+1 of K. A row without tokens is never a success.
    """
    rows = counted_rows(group, count_replayed=count_replayed)
    return Evidence(sum(len(row.response) > 0 and is_success(row.reward, success) for row in rows), len(rows))


def deviation_counts(groups: Sequence[Group], samples: int, *, count_replayed: bool = False) -> npt.NDArray[np.float64]:
    """[len(groups)] what stands for success counts where rewards are continuous (arXiv 2510.02245, section 5.3).

    round(K * (sigma_q - min) / max(max - min, eps)), sigma_q the standard deviation of a group's counted rewards, min
    and max over the groups given (those of one step), rounded half up: 0..K.
    """
    if not groups:
        return np.empty(0)
    sigma = np.array(
        [np.std([row.reward for row in counted_rows(group, count_replayed=count_replayed)]) for group in groups]
    )
    scaled = samples * (sigma - sigma.min()) / max(sigma.max() - sigma.min(), EPSILON)
    return np.floor(scaled + 0.5)


def in_band(count: float, samples: int, band: str) -> bool:
    """Whether a success count of K falls into a band of the preliminary study (arXiv 2510.02245).

    easy: [75, 100) %, medium: (25, 75] %, hard: (0, 25] %. Exactly 75 % is in two of them, as the paper has it;
    each of its runs trains on one band. all: always.
    """
    match band:
        case "all":
            return True
        case "easy":
            return 3 * samples <= 4 * count < 4 * samples
        case "medium":
            return samples < 4 * count <= 3 * samples
        case "hard":
            return 0 < 4 * count <= samples
    raise ValueError(f"band: unknown band {band!r}; expected all, easy, medium or hard")
