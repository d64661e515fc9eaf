"""Selection of the rows of a graded batch to store: functions `(batch, options) -> [N] bool`, False for replayed rows.

With `needs(distinct="response")` only the newest of equal answers to a question is kept, with "key" also of those with
the same solution key. Without it all are kept, so that a group stays whole. With `needs(scores=True)` the function may
read the scores of fresh rows, which are then computed for all of them.
"""

import numpy as np

from exgrpo.train.common.functions import needs
from exgrpo.train.common.records import Mask
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.common.success import EPSILON, is_success
from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.replay.groups import count_successes


@needs(distinct="response")
def successes(batch: StepBatch, options: MethodOptions) -> Mask:
    """Fresh successes; with continuous rewards, the answers that beat their group's mean.

    ExGRPO, arXiv 2510.02245, section 3.2.
    """
    if options.experience.bucket_by == "reward_deviation":
        return batch.fresh & (batch.reward >= batch.mean(batch.reward)[batch.group] + EPSILON)
    return batch.fresh & is_success(batch.reward, options.success)


@needs(distinct="response")
def rare(batch: StepBatch, options: MethodOptions) -> Mask:
    """The fresh success of a group that has no second one (SU-01, arXiv 2605.13301)."""
    right = successes(batch, options)
    return right & (np.bincount(batch.group[right], minlength=batch.groups) == 1)[batch.group]


@needs(distinct="key")
def solutions(batch: StepBatch, options: MethodOptions) -> Mask:
    """Fresh successes, of which only the newest with the same solution key is kept for a question.

    So a frequent solution does not fill the buffer (modes in Re:Max, package remax-rl).
    """
    return successes(batch, options)


def with_advantage(batch: StepBatch, options: MethodOptions) -> Mask:
    """All fresh answers of groups whose rewards differ, and so with advantages.

    Rollout-level replay, arXiv 2606.04560; POPO, arXiv 2606.01281.
    """
    return batch.fresh & batch.has_signal[batch.group]


def in_band(batch: StepBatch, options: MethodOptions) -> Mask:
    """All fresh answers of groups whose pass rate m / F lies in `band`.

    The high-quality groups of BAPO, arXiv 2602.20722.
    """
    shown = count_successes(batch, options.success)
    low, high = options.experience.band
    rate = (shown.successes / np.maximum(shown.rows, 1))[batch.group]
    return batch.fresh & (low - EPSILON <= rate) & (rate <= high + EPSILON)


def all(batch: StepBatch, options: MethodOptions) -> Mask:
    """All fresh answers, right or wrong (Arnal et al., arXiv 2604.08706; RePO, arXiv 2506.09340)."""
    return batch.fresh


@needs(distinct="response")  # of what a run starts with
def nothing(batch: StepBatch, options: MethodOptions) -> Mask:
    """No answer: only traces given at the start are replayed."""
    return np.zeros(len(batch), bool)
