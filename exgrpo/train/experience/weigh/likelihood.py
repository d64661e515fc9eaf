"""Rehearsal of successes by their likelihood (Re:Max and Re:Dr, package remax-rl)."""

from collections.abc import Sequence

import numpy as np

from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.weighing import PRESENT, ReplayedAnswer, Weighed, WeighOptions
from exgrpo.train.reward.success import is_success


@needs(term="ratio")
def weigh(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """The log-probability of a success, times the coefficient; nothing of a failure. No ratio, no advantage.

    The ratio to the policy itself is 1, and its gradient that of the log-probability.
    """
    return [
        Weighed(
            np.full_like(answer.log_prob, PRESENT),
            advantage=options.coefficient * is_success(answer.reward, options.success),
        )
        for answer in answers
    ]
