"""Which stored success of a drawn question is replayed (section 3.2: the lowest entropy now)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from exgrpo.train.records import Trajectory


class MeanScore(NamedTuple):
    """A response under the current policy at temperature 1: means over its tokens, in nats."""

    entropy: float
    nll: float
    """Negative log-probability."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """The C stored successes of a drawn question, and their scores where the rule asks for them.

    Attributes:
        trajectories: [C], at least one, oldest first.
        scores: [C] of each; empty without scores.
    """

    trajectories: Sequence[Trajectory]
    scores: Sequence[MeanScore] = ()

    @property
    def entropy(self) -> list[float]:
        """[C] mean token entropy of each."""
        return [score.entropy for score in self.scores]

    @property
    def nll(self) -> list[float]:
        """[C] mean negative log-probability of each."""
        return [score.nll for score in self.scores]

    @property
    def lengths(self) -> list[int]:
        """[C] response tokens of each."""
        return [len(trajectory.response) for trajectory in self.trajectories]


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
    "lowest_entropy": SelectionRule(lambda candidates, rng: int(np.argmin(candidates.entropy)), scored=True),
    "highest_entropy": SelectionRule(lambda candidates, rng: int(np.argmax(candidates.entropy)), scored=True),
    "lowest_nll": SelectionRule(lambda candidates, rng: int(np.argmin(candidates.nll)), scored=True),
    "shortest": SelectionRule(lambda candidates, rng: int(np.argmin(candidates.lengths))),
    "random": SelectionRule(lambda candidates, rng: int(rng.integers(len(candidates.trajectories)))),
}
"""By the name that `experience.trajectory` gives it."""
