"""Correction and trust region apart (POPO, arXiv 2606.01281, by its authors' description; decoupled PPO)."""

from collections.abc import Sequence

import numpy as np

from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.weighing import ReplayedAnswer, Weighed, WeighOptions

MOST = 20.0
"""Log-ratios count as at most this much, as in the kernels."""


@needs(term="clipped", present="values")
def weigh(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """pi_old / pi_past times the ratio to pi_old, clipped, with pi_old the policy before this step's update."""
    return [
        Weighed(answer.present, np.exp(np.minimum(answer.log_ratio, MOST)).astype(np.float32))
        for answer in answers
        if answer.present is not None
    ]
