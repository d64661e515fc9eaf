"""How hard a question is for the current policy, read from a graded group: its success count and its band."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from exgrpo.train.experience.tables import look_up
from exgrpo.train.records import Group
from exgrpo.train.reward.success import EPSILON, is_success


@dataclass(frozen=True)
class Evidence:
    """What a group shows about the current policy.

    Attributes:
        successes: m, how many of the answers that count are successes.
        rewards: of the F answers that count.
    """

    successes: int
    rewards: tuple[float, ...]

    @property
    def rows(self) -> int:
        """F, the number of answers that count."""
        return len(self.rewards)

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


def count_successes(group: Group, success: float, *, count_replayed: bool = False) -> Evidence:
    """The successes among the rows that count.

    The replayed row is no evidence of the current policy: of a mixed group the m successes of the K-1 fresh rows
    count. `count_replayed` counts it too, m+1 of K. A row without tokens is never a success.
    """
    rows = group.rows if count_replayed else group.fresh
    successes = sum(len(row.response) > 0 and is_success(row.reward, success) for row in rows)
    return Evidence(successes, tuple(row.reward for row in rows))


def success_counts(shown: Sequence[Evidence], samples: int) -> npt.NDArray[np.float64]:
    """[len(shown)] the success count of each group, on the scale of K = `samples`."""
    return np.array([evidence.count(samples) for evidence in shown])


def deviation_counts(shown: Sequence[Evidence], samples: int) -> npt.NDArray[np.float64]:
    """[len(shown)] what stands for success counts where rewards are continuous (arXiv 2510.02245, section 5.3).

    round(K * (sigma_q - min) / max(max - min, eps)), sigma_q the standard deviation of a group's counted rewards, min
    and max over the groups given (those of one step), rounded half up: 0..K.
    """
    if not shown:
        return np.empty(0)
    sigma = np.array([np.std(evidence.rewards) for evidence in shown])
    scaled = samples * (sigma - sigma.min()) / max(sigma.max() - sigma.min(), EPSILON)
    return np.floor(scaled + 0.5)


BANDS: dict[str, Callable[[float, int], bool]] = {
    "all": lambda count, samples: True,
    "easy": lambda count, samples: 3 * samples <= 4 * count < 4 * samples,
    "medium": lambda count, samples: samples < 4 * count <= 3 * samples,
    "hard": lambda count, samples: 0 < 4 * count <= samples,
}
"""Whether a success count of K = `samples` is in a band, by the name that `objective.train_on` gives it.

Bands of the preliminary study (arXiv 2510.02245). easy: [75, 100) %, medium: (25, 75] %, hard: (0, 25] %. Exactly 75 %
is in two of them, as the paper has it; each of its runs trains on one band. all: always.
"""


def in_band(count: float, samples: int, band: str) -> bool:
    """Whether a success count of K = `samples` falls into one of `BANDS`.

    Raises:
        ValueError: there is no band of that name.
    """
    return look_up(BANDS, band, "band")(count, samples)
