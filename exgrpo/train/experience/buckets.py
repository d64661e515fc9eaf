"""How graded groups are read: as numbers of successes, or by continuous rewards (section 5.3 of the paper)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from exgrpo.train.experience.difficulty import Evidence, deviation_counts, success_counts
from exgrpo.train.records import Mask
from exgrpo.train.reward.success import EPSILON, is_success
from exgrpo.train.step_batch import Doubles, StepBatch


@dataclass(frozen=True)
class Buckets:
    """What a step's groups say about their questions.

    Attributes:
        counts: evidence of the groups of one step, and K, to their success counts [G].
        admitted: a batch, and the reward of a success, to whether each row [N] is worth storing.
        progress: the fresh rewards [N] of a step, and the reward of a success, to the number by which replay starts.
    """

    counts: Callable[[Evidence, int], Doubles]
    admitted: Callable[[StepBatch, float], Mask]
    progress: Callable[[Doubles, float], float]


def pass_rate(rewards: Doubles, success: float) -> float:
    """The fraction of successes among rewards [N], N >= 1."""
    return float(np.mean(is_success(rewards, success)))


def mean_reward(rewards: Doubles, success: float) -> float:
    """The mean of rewards [N]: continuous ones may never reach `success`."""
    return float(rewards.mean())


def successes(batch: StepBatch, success: float) -> Mask:
    """The fresh rows that are successes."""
    return batch.fresh & is_success(batch.reward, success)


def better_than_mean(batch: StepBatch, success: float) -> Mask:
    """The fresh rows whose advantage was positive, whatever `success` is."""
    return batch.fresh & (batch.reward >= batch.mean(batch.reward)[batch.group] + EPSILON)


BUCKETS = {
    "success_count": Buckets(success_counts, successes, pass_rate),
    "reward_deviation": Buckets(deviation_counts, better_than_mean, mean_reward),
}
"""By the name that `experience.bucket_by` gives it."""
