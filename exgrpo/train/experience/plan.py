"""Which questions a training step asks anew, and whether replay has begun."""

import numpy as np
import numpy.typing as npt


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
