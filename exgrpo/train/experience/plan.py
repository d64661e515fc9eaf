"""What a training step asks: its groups, fresh questions, and whether replay has begun."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class PlannedGroup:
    """One group of a step.

    Attributes:
        question: its question.
        fresh: how many answers are generated.
        choose: how many of the question's stored answers join; the rule of trajectories says which.
        rows: stored answers that join, as rows of the memory's table.
    """

    question: int
    fresh: int
    choose: int = 0
    rows: tuple[int, ...] = ()


class DelayedStart:
    """A one-way latch: closed until a step's batch Pass@1 exceeds the threshold, then open for good."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.open = threshold == 0

    def observe(self, pass_rate: float) -> None:
        """Take in the fraction of correct fresh rollouts of a step; it counts from the next step on."""
        self.open = self.open or pass_rate > self.threshold


@dataclass(frozen=True)
class Mixture:
    """Sources of questions, and how often each is drawn from.

    Attributes:
        sizes: [S] questions of each source, at least one; the indices of one source follow those of the one before.
        weights: [S] positive numbers: the shares of the sources among the fresh questions, while all have some left.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]


class FreshQuestions:
    """Questions in random order, epoch after epoch, without the retired ones.

    With a mixture, each source has an order and epochs of its own, and the source of each next question is drawn by
    weight among those that have a question left. Without one, all questions are one source.

    Args:
        questions: N; they are known by index 0..N-1.
        rng: draws the orders and the sources.
        mixture: of sources; None: there is one.

    Attributes:
        order: [N] the questions of each source in their random order, one source after the other.
        position: [S] how many of its order each source has given in its present epoch.
    """

    def __init__(self, questions: int, rng: np.random.Generator, mixture: Mixture | None = None) -> None:
        self.rng = rng
        sizes = mixture.sizes if mixture else (questions,)
        if sum(sizes) != questions:
            raise ValueError(f"mixture: sizes of {sum(sizes)} questions together, and there are {questions}")
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._starts = self._ends - np.array(sizes, np.int64)
        self._weights = np.array(mixture.weights) if mixture else None
        self.order = np.concatenate([self._permuted(source) for source in range(len(sizes))])
        self.position = np.zeros(len(sizes), np.int64)

    def _permuted(self, source: int) -> npt.NDArray[np.int64]:
        return self._starts[source] + self.rng.permutation(int(self._ends[source] - self._starts[source]))

    def draw(self, count: int, excluded: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """The next `count` distinct questions that are not excluded; fewer where no more exist."""
        left = np.add.reduceat(~excluded, self._starts, dtype=np.int64)
        drawn: list[int] = []
        taken = excluded.copy()
        for _ in range(min(count, int(left.sum()))):
            source = self._source(left)
            question = self._next(source, taken)
            taken[question] = True
            left[source] -= 1
            drawn.append(question)
        return np.array(drawn, dtype=np.int64)

    def _source(self, left: npt.NDArray[np.int64]) -> int:
        """The source of the next question, given how many each has left; at least one has some."""
        if self._weights is None:
            return 0
        shares = np.where(left > 0, self._weights, 0.0)
        return int(self.rng.choice(len(shares), p=shares / shares.sum()))

    def _next(self, source: int, taken: npt.NDArray[np.bool_]) -> int:
        """The next question of a source that is not taken; there is one."""
        start, end = int(self._starts[source]), int(self._ends[source])
        while True:
            if self.position[source] == end - start:
                self.order[start:end] = self._permuted(source)
                self.position[source] = 0
            question = int(self.order[start + self.position[source]])
            self.position[source] += 1
            if not taken[question]:
                return question
