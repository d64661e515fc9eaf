"""A method's own function, as a user would write it."""

import numpy as np

from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.replay import MethodOptions, Weighed, needs
from exgrpo.train.replay.contract import PRESENT


@needs(term="ratio")
def doubled(batch: StepBatch, options: MethodOptions) -> Weighed:
    """Twice the gradient of the log-probability, times the advantage."""
    return Weighed(np.full_like(batch.old_log_prob, PRESENT), np.full_like(batch.old_log_prob, 2))
