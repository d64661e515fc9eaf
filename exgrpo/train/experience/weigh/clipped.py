"""The clipped importance ratio of PPO (Arnal et al., arXiv 2604.08706; RePO, arXiv 2506.09340; and others)."""

from collections.abc import Sequence

from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.weighing import ReplayedAnswer, Weighed, WeighOptions


@needs(term="clipped")
def weigh(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """w against the policy that wrote the answer, clipped as that of a fresh token."""
    return [Weighed(answer.log_prob) for answer in answers]
