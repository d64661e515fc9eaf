"""Replayed answers are taken for fresh ones (RLEP, arXiv 2507.07451: its code computes all old log-probs anew)."""

from collections.abc import Sequence

from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.weighing import ReplayedAnswer, Weighed, WeighOptions


@needs(term="clipped", present="reference")
def weigh(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """The clipped ratio, as if the policy before this step's update had written the answer."""
    return [Weighed(answer.present) for answer in answers if answer.present is not None]
