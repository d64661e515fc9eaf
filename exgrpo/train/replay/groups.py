"""Numbers of graded groups: advantages, success counts and bands of difficulty for the current policy.

Counts are numbers of successes, or come from continuous rewards (arXiv 2510.02245, section 5.3).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from exgrpo.train.common.records import Mask
from exgrpo.train.common.step_batch import Doubles, Floats, Ints, StepBatch
from exgrpo.train.common.success import EPSILON, is_success
from exgrpo.train.config.objective import Band, ObjectiveConfig

STD_EPSILON = 1e-6
"""Added to a standard deviation before it divides, as in `exgrpo.kernels.group_advantage`."""


def group_advantages(
    reward: Doubles, group: Ints, weight: npt.NDArray, options: ObjectiveConfig, dtype: type = np.float64
) -> npt.NDArray:
    """Return each reward minus the baseline of its group, [N].

    Args:
        reward: [N] net of penalties.
        group: [N] number of the group.
        weight: [N] how often each counts in its group; those with 0 are compared without counting.
        options: `baseline`: mean (Dr. GRPO); leave_one_out, over the other rows (RLOO, arXiv 2402.14740), which is
            n / (n - 1) times as much; log_mean_exp, beta1 log mean exp(reward / beta1) (OAPL, A*-PO). `scale_by_std`:
            divide by the sample standard deviation of the group.
        dtype: of advantages over a mean; those over log_mean_exp are fp64.
    """
    counted = np.flatnonzero(weight)

    def sums(values: Doubles | float) -> Any:
        return np.bincount(group[counted], (weight * values)[counted], group.max(initial=0) + 1)

    size = sums(1.0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if options.baseline == "log_mean_exp":
            best = np.full(len(size), -np.inf)
            np.maximum.at(best, group[counted], reward[counted])
            # Without the best reward in the exponentials, it is the value to the bit where all are alike.
            powers = np.exp((reward - best[group]) / options.beta1)
            return reward - (best + options.beta1 * np.log(sums(powers) / size))[group]
        # Sums of fp32 numbers are exact in fp64: where all rewards are alike, advantages are 0.
        reward = reward.astype(np.float32).astype(np.float64)
        advantage = reward - (sums(reward) / size)[group]
        others = np.maximum(size - 1, 1)
        if options.scale_by_std:
            variance = sums(advantage**2) / size * size / others  # as the kernel rounds
            advantage /= (np.sqrt(variance) + STD_EPSILON)[group]
        advantage = advantage.astype(dtype)
        if options.baseline == "leave_one_out":
            advantage *= (size / others).astype(dtype)[group]
    return advantage


def fill_advantages(batch: StepBatch, options: ObjectiveConfig) -> None:
    """Fill `advantage` in the groups that are trained on; rows of other groups have NaN.

    Rows with a stored advantage keep it and do not count in their group.
    """
    rows, advantage = batch.rows_of(batch.trained), np.full(len(batch), np.nan)
    counted = in_group(batch)[rows]
    advantage[rows] = group_advantages(batch.net_reward[rows], batch.group[rows], counted, options, np.float32)
    if batch.has("stored_advantage"):
        advantage[rows[~counted]] = batch.stored_advantage[rows[~counted]]
    batch.fill(advantage=advantage)


def drift_and_headroom(batch: StepBatch, log_prob: Floats, advantage: Doubles) -> dict[str, Doubles]:
    """Return the columns `drift` and `headroom` [N] by the latest log-probs [T] and the stored advantages [N]."""
    log_prob, tokens = log_prob.astype(np.float64), np.maximum(batch.num_tokens, 1)
    p = batch.sums(np.exp(log_prob)) / tokens
    return {
        "drift": batch.sums((log_prob - batch.old_log_prob) ** 2) / tokens,
        "headroom": np.select([advantage > 0, advantage < 0], [1 - p, p]),
    }


def in_group(batch: StepBatch) -> npt.NDArray[np.bool_]:
    """[N] True if a row counts in the baseline of its group: it has no stored advantage."""
    return np.isnan(batch.stored_advantage) if batch.has("stored_advantage") else np.ones(len(batch), bool)


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
