"""What a training step works on: fresh questions, replayed ones, and whether replay has begun."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from exgrpo.train.experience.memory import ExperienceMemory
from exgrpo.train.experience.sampling import LogWeights, draw_questions


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Question indices of one step: each fresh one gets K rollouts, each replayed one K-1."""

    fresh: npt.NDArray[np.int64]
    replayed: npt.NDArray[np.int64]

    @property
    def questions(self) -> list[int]:
        """All of them, fresh ones first."""
        return [*self.fresh.tolist(), *self.replayed.tolist()]


class DelayedStart:
    """A one-way latch: closed until a step's batch Pass@1 exceeds the threshold, then open for good."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.open = threshold == 0

    def observe(self, pass_rate: float) -> None:
        """Take in the fraction of correct fresh rollouts of a step; it counts from the next step on."""
        self.open = self.open or pass_rate > self.threshold


class FreshQuestions:
    """Questions in random order, epoch after epoch, without the retired ones."""

    def __init__(self, questions: int, rng: np.random.Generator) -> None:
        self.rng = rng
        self.order = rng.permutation(questions)
        self.position = 0

    def draw(self, count: int, excluded: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """The next `count` distinct questions that are not excluded; fewer where no more exist."""
        count = min(count, int((~excluded).sum()))
        drawn: list[int] = []
        taken = excluded.copy()
        while len(drawn) < count:
            if self.position == len(self.order):
                self.order = self.rng.permutation(len(self.order))
                self.position = 0
            question = int(self.order[self.position])
            self.position += 1
            if not taken[question]:
                taken[question] = True
                drawn.append(question)
        return np.array(drawn, dtype=np.int64)


def plan_questions(
    memory: ExperienceMemory,
    pool: FreshQuestions,
    rng: np.random.Generator,
    *,
    batch: int,
    ratio: float,
    law: LogWeights | None,
) -> StepPlan:
    """Choose the questions of a step: n = min(floor(ratio * batch), |E|) replayed, batch - n fresh.

    A question is in the batch once at most. Where too few are left unretired, the batch is smaller. Before replay has
    begun, `ratio` is 0.
    """
    # The small term keeps products such as 0.29 * 100 = 28.999999999999996 from losing a question.
    wanted = math.floor(ratio * batch + 1e-9)
    replayed = draw_questions(rng, memory.count, min(wanted, len(memory)), law)
    excluded = memory.retired.copy()
    excluded[replayed] = True
    return StepPlan(fresh=pool.draw(batch - len(replayed), excluded), replayed=replayed)
