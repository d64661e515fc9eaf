"""The plain importance ratio (the ablation of ExGRPO, arXiv 2510.02245, without shaping)."""

from collections.abc import Sequence

from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.weighing import ReplayedAnswer, Weighed, WeighOptions


@needs(term="ratio")
def weigh(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """w against the policy that wrote the answer, without a bound."""
    return [Weighed(answer.log_prob) for answer in answers]
