"""A Jensen-Shannon divergence to the policies of the stored answers (DPH-RL, arXiv 2509.07430; as in DyJR, 2603.16157).

With samples of a past policy q and u = p / q, E_q[u log u - (u + 1) log((u + 1) / 2)] is twice the divergence.
"""

from collections.abc import Sequence

import numpy as np

from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.weighing import PRESENT, ReplayedAnswer, Weighed, WeighOptions

MOST = 20.0
"""Log-ratios count as at most this much, as in the kernels."""


@needs(term="ratio", present="values")
def weigh(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """Minus the coefficient times the divergence: -u log(2 u / (1 + u)) is the gradient on each log-probability.

    u is that of the policy before this step's update. No advantage, no reward.
    """
    return [
        Weighed(
            np.full_like(answer.log_prob, PRESENT),
            _pull(np.minimum(answer.log_ratio.astype(np.float64), MOST)).astype(np.float32),
            options.coefficient,
        )
        for answer in answers
    ]


def _pull(log_u: np.ndarray) -> np.ndarray:
    """-u log(2 u / (1 + u)), by log u."""
    return -np.exp(log_u) * (np.log(2) - np.logaddexp(0, -log_u))
