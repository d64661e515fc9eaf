"""How graded groups are read: as numbers of successes, or by continuous rewards (section 5.3 of the paper)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from exgrpo.train.experience.difficulty import Evidence, deviation_counts, success_counts
from exgrpo.train.records import Group, Trajectory
from exgrpo.train.reward.success import EPSILON, is_success

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Buckets:
    """What a step's groups say about their questions.

    Attributes:
        counts: evidence of the groups of one step, and K, to their success counts [len(groups)].
        admitted: a group, and the reward of a success, to its fresh rows that are worth storing.
        progress: the fresh rewards [N] of a step, and the reward of a success, to the number by which replay starts.
    """

    counts: Callable[[Sequence[Evidence], int], Floats]
    admitted: Callable[[Group, float], list[Trajectory]]
    progress: Callable[[Floats, float], float]


def pass_rate(rewards: Floats, success: float) -> float:
    """The fraction of successes among rewards [N], N >= 1."""
    return float(np.mean(is_success(rewards, success)))


def mean_reward(rewards: Floats, success: float) -> float:
    """The mean of rewards [N]: continuous ones may never reach `success`."""
    return float(rewards.mean())


def successes(group: Group, success: float) -> list[Trajectory]:
    """The fresh rows that are successes."""
    return [row for row in group.fresh if is_success(row.reward, success)]


def better_than_mean(group: Group, success: float) -> list[Trajectory]:
    """The fresh rows whose advantage was positive, whatever `success` is."""
    mean = float(np.mean([row.reward for row in group.rows]))
    return [row for row in group.fresh if row.reward >= mean + EPSILON]


BUCKETS = {
    "success_count": Buckets(success_counts, successes, pass_rate),
    "reward_deviation": Buckets(deviation_counts, better_than_mean, mean_reward),
}
"""By the name that `experience.bucket_by` gives it."""
