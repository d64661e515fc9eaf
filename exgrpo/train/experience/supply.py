"""What a function `compose` of `exgrpo.train.experience.compose` works with and what it gives.

`compose(supply) -> planned groups` is called before anything is generated. A function that decides what is trained on
after the answers are graded says so by `needs(settle=function)`: `settle(batch, supply)` gets the graded groups of the
step, after the memory has taken them in, and gives numbers of groups, or planned groups of stored answers alone. If
these are of one answer each, it says `needs(alone=True)`, for such a group has no advantage of its own. If they take
the places of graded groups, it says `needs(fills=True)`: further questions (`rollout.refills`) would be asked for the
same places.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from exgrpo.train.experience.memory import ExperienceMemory
from exgrpo.train.experience.plan import FreshQuestions, PlannedGroup
from exgrpo.train.experience.sampling import Priority, draw
from exgrpo.train.experience.settings import Setting
from exgrpo.train.experience.table import Table
from exgrpo.train.experience.units import Units
from exgrpo.train.step_batch import Ints, StepBatch

Kind = Literal["buffered", "prompts", "stored"]


Compose = Callable[["Supply"], Sequence[PlannedGroup]]
Settle = Callable[[StepBatch, "Supply"], Sequence[int | PlannedGroup]]


@dataclass(frozen=True, eq=False)
class Supply:
    """What the batch of a step can be made of.

    Attributes:
        step: that is planned.
        batch: B, questions of a step.
        ratio: rho; 0 before replay has begun.
        setting: K and the options.
        memory: what is stored.
        pool: the fresh questions.
        prioritise: gives the weights of units.
        rng: of all draws but those of fresh questions.
    """

    step: int
    batch: int
    ratio: float
    setting: Setting
    memory: ExperienceMemory
    pool: FreshQuestions
    prioritise: Callable[[Units, Setting], Priority]
    rng: np.random.Generator

    @property
    def samples(self) -> int:
        """K, answers per question."""
        return self.setting.samples

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
        return names[draw(self.rng, len(names), wanted, self.prioritise(units, self.setting))]

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


def settles(compose: Compose) -> Settle | None:
    """The function that decides after grading; None: what was planned is trained on."""
    return getattr(compose, "settle", None)


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
