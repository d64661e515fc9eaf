"""What a function `compose` of `exgrpo.train.replay.compose` works with: fresh questions, and stored answers.

`compose(supply) -> planned groups` is called before anything is generated. A function that decides what is trained on
after the answers are graded says so by `needs(settle=function)`: `settle(batch, supply)` gets the graded groups of the
step, after the memory has taken them in, and gives numbers of groups, or planned groups of stored answers alone. If
these are of one answer each, it says `needs(alone=True)`, for such a group has no advantage of its own. If they take
the places of graded groups, it says `needs(fills=True)`: further questions (`rollout.refills`) would be asked for the
same places. If `settle` reads the scores of fresh rows, it says `needs(scores=True)`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from exgrpo.train.common.step_batch import Ints
from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.replay.candidates import Priority, Units, draw
from exgrpo.train.replay.contract import PlannedGroup
from exgrpo.train.replay.memory import ExperienceMemory
from exgrpo.train.replay.table import Table

Kind = Literal["buffered", "prompts", "stored"]


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
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._starts = self._ends - np.array(sizes, np.int64)
        self._weights = np.array(mixture.weights) if mixture else None
        self.order = np.concatenate([self._permuted(source) for source in range(len(sizes))])
        self.position = np.zeros(len(sizes), np.int64)

    def _permuted(self, source: int) -> Ints:
        return self._starts[source] + self.rng.permutation(int(self._ends[source] - self._starts[source]))

    def draw(self, count: int, excluded: npt.NDArray[np.bool_]) -> Ints:
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

    def _source(self, left: Ints) -> int:
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


@dataclass(frozen=True, eq=False)
class Supply:
    """What the batch of a step can be made of.

    Attributes:
        step: that is planned.
        batch: B, questions of a step.
        ratio: rho; 0 before replay has begun.
        options: of the method, and K.
        memory: what is stored.
        pool: the fresh questions.
        prioritise: gives the weights of units.
        rng: of all draws but those of fresh questions.
    """

    step: int
    batch: int
    ratio: float
    options: MethodOptions
    memory: ExperienceMemory
    pool: FreshQuestions
    prioritise: Callable[[Units, MethodOptions], Priority]
    rng: np.random.Generator

    @property
    def samples(self) -> int:
        """K, answers per question."""
        return self.options.samples

    def share(self, of: int) -> int:
        """floor(rho of)."""
        # The small term keeps products such as 0.29 * 100 = 28.999999999999996 from losing a question.
        return math.floor(self.ratio * of + 1e-9)

    def units(self, kind: Kind) -> Units:
        """Questions with stored answers, prompts that were asked already, or all stored answers."""
        return getattr(self.memory, kind)(self.step)

    def draw(self, kind: Kind, wanted: int) -> Ints:
        """At most `wanted` different units by their weights: indices of questions, or rows of stored answers."""
        units = self.units(kind)
        return self.draw_from(units, wanted, self.memory.table.rows() if kind == "stored" else units.question)

    def draw_from(self, units: Units, wanted: int, names: Ints) -> Ints:
        """At most `wanted` of some units by their weights, by their names [len(units)]."""
        wanted = min(wanted, len(names))
        if wanted == 0:
            return np.empty(0, np.int64)
        return names[draw(self.rng, len(names), wanted, self.prioritise(units, self.options))]

    def earlier(self) -> tuple[Units, Ints]:
        """The stored answers of earlier steps, and their rows."""
        table = self.memory.table
        before = table.column("step") < self.step
        count = int(np.count_nonzero(before))
        # They were stored first, as a rule: then there is nothing to gather.
        places = slice(count) if before[:count].all() else np.flatnonzero(before)
        return self.units("stored").take(places), table.rows()[places]

    def fresh(self, wanted: int, without: Ints | Sequence[int] = ()) -> list[PlannedGroup]:
        """Groups of K answers to the next questions, at most `wanted`, that have not left and are not `without`."""
        excluded = self.memory.retired.copy()
        excluded[np.asarray(without, np.int64)] = True
        return [PlannedGroup(question, self.samples) for question in self.pool.draw(wanted, excluded).tolist()]

    def alone(self, rows: Ints) -> list[PlannedGroup]:
        """A group for each of some stored answers."""
        questions = self.memory.table.values("question", rows)
        return [PlannedGroup(q, 0, rows=(row,)) for q, row in zip(questions.tolist(), rows.tolist(), strict=True)]


def with_stored(supply: Supply, groups: Sequence[PlannedGroup], most: int) -> list[PlannedGroup]:
    """Fresh groups, of which the first floor(rho B) are joined by at most so many stored answers, which come last."""
    held = supply.memory.table.held
    joined = [min(most, int(held[group.question])) for group in groups[: supply.share(supply.batch)]]
    first = [dataclasses.replace(group, choose=several) for group, several in zip(groups, joined, strict=False)]
    return sorted([*first, *groups[len(first) :]], key=lambda group: group.choose > 0)


def draw_groups(supply: Supply, wanted: int, without: Ints | Sequence[int] = ()) -> list[PlannedGroup]:
    """At most `wanted` whole groups of earlier steps, to questions that are not `without`.

    The weight of a group is that of its first answer. Two groups to one question may be drawn.
    """
    table = supply.memory.table
    question, step = table.column("question"), table.column("step")
    first = first_of_groups(table)
    first = first[(step[first] < supply.step) & ~np.isin(question[first], without)]
    return groups_at(table, supply.draw_from(supply.units("stored").take(first), wanted, first))


def first_of_groups(table: Table) -> Ints:
    """Where a group begins among the rows: what follows each other, to one question of one step, is one."""
    question, step = table.column("question"), table.column("step")
    return np.flatnonzero(np.append(True, (question[1:] != question[:-1]) | (step[1:] != step[:-1]))[: len(question)])


def groups_at(table: Table, places: Ints) -> list[PlannedGroup]:
    """The whole stored groups, as they were written, that some places among the rows belong to."""
    rows, question, first = table.rows(), table.column("question"), first_of_groups(table)
    numbers = dict.fromkeys((np.searchsorted(first, places, side="right") - 1).tolist())
    ends = np.append(first[1:], len(rows))
    return [
        PlannedGroup(int(question[first[number]]), 0, rows=tuple(rows[first[number] : ends[number]].tolist()))
        for number in numbers
    ]
