"""Failures that the policy has left are not pushed further away (mu-GRPO, arXiv 2605.17570)."""

from collections.abc import Sequence

import numpy as np

from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.weighing import ReplayedAnswer, Weighed, WeighOptions


@needs(term="clipped", present="values")
def weigh(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """The clipped ratio; of an answer with A < 0, nothing behind its first token with w below the trigger is learnt."""
    return [Weighed(answer.log_prob, _factor(answer, np.log(options.trigger))) for answer in answers]


def _factor(answer: ReplayedAnswer, trigger: float) -> np.ndarray | None:
    left = np.flatnonzero(answer.log_ratio < trigger)
    if answer.advantage >= 0 or not len(left):
        return None
    return (np.arange(len(answer.log_prob)) <= left[0]).astype(np.float32)
