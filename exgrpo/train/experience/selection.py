"""Which stored success of a drawn question is replayed (section 3.2: the lowest entropy now)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from exgrpo.train.records import Score
from exgrpo.train.step_batch import Doubles, Ints, StepBatch


class MeanScores(NamedTuple):
    """N responses under the current policy at temperature 1: means over the tokens that it wrote, in nats.

    Attributes:
        entropy: [N].
        nll: [N] negative log-probability.
    """

    entropy: Doubles
    nll: Doubles

    @classmethod
    def of(cls, batch: StepBatch, score: Score) -> "MeanScores":
        """Of the rows of a batch, from the scores of its tokens."""
        entropy, log_prob = (
            np.array([float(batch.of_row(row, values).mean()) for row in range(len(batch))])
            for values in (score.entropy, score.log_prob)
        )
        return cls(entropy, -log_prob)


class Candidates(NamedTuple):
    """The C stored successes of a drawn question, oldest first, C >= 1.

    Attributes:
        length: [C] response tokens of each.
        scores: [C] of each; NaN where the rule does not ask for them.
    """

    length: Ints
    scores: MeanScores


@dataclass(frozen=True)
class SelectionRule:
    """One way to choose.

    Attributes:
        choose: index of the chosen candidate, among equals the first, which is the oldest; the generator is for
            rules that draw.
        scored: whether the candidates need scores, which takes a pass through the model.
    """

    choose: Callable[[Candidates, np.random.Generator], int]
    scored: bool = False


RULES = {
    "lowest_entropy": SelectionRule(lambda candidates, rng: int(np.argmin(candidates.scores.entropy)), scored=True),
    "highest_entropy": SelectionRule(lambda candidates, rng: int(np.argmax(candidates.scores.entropy)), scored=True),
    "lowest_nll": SelectionRule(lambda candidates, rng: int(np.argmin(candidates.scores.nll)), scored=True),
    "shortest": SelectionRule(lambda candidates, rng: int(np.argmin(candidates.length))),
    "random": SelectionRule(lambda candidates, rng: int(rng.integers(len(candidates.length)))),
}
"""By the name that `experience.trajectory` gives it."""
