"""Advantages of answers in their groups: one function for the loss, the memory and experience from elsewhere."""

from typing import Any

import numpy as np
import numpy.typing as npt

from exgrpo.train.common.step_batch import Doubles, Ints, StepBatch
from exgrpo.train.config.objective import ObjectiveConfig

EPSILON = 1e-6
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
            advantage /= (np.sqrt(variance) + EPSILON)[group]
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


def in_group(batch: StepBatch) -> npt.NDArray[np.bool_]:
    """[N] True if a row counts in the baseline of its group: it has no stored advantage."""
    return np.isnan(batch.stored_advantage) if batch.has("stored_advantage") else np.ones(len(batch), bool)
