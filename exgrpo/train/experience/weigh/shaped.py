"""The shaped importance ratio (ExGRPO, arXiv 2510.02245, section 3.3; LUFFY, arXiv 2504.14945)."""

from collections.abc import Sequence

from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.weighing import ReplayedAnswer, Weighed, WeighOptions


@needs(term="shaped")
def weigh(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """f(w) = w / (w + beta), w against the policy that wrote the answer."""
    return [Weighed(answer.log_prob) for answer in answers]
