"""The shaped ratio without importance correction (the ablation of ExGRPO, arXiv 2510.02245)."""

from collections.abc import Sequence

from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.weighing import ReplayedAnswer, Weighed, WeighOptions


@needs(term="shaped", present="reference")
def weigh(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """f(w), as if the policy before this step's update had written the answer."""
    return [Weighed(answer.present) for answer in answers if answer.present is not None]
