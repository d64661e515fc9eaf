"""Planning of a batch: fresh questions, stored answers, and draws of both.

`compose(planner) -> planned groups` is called before anything is generated. With `needs(settle=function)`,
`settle(batch, planner)` gets the graded groups of the step after the memory has stored them, and returns numbers of
groups to train on, and planned groups of stored answers alone. Further declarations of `compose`: `alone` if these are
of one answer each, since such a group has no advantage of its own; `fills` if they take the places of graded groups,
for which `rollout.refills` would ask further questions; `in_place` if planned stored answers take the places of fresh
ones; `keeps_groups` if all planned groups have K answers and are trained on. `settle` declares `scores` if it reads the
scores of fresh rows.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from exgrpo.train.common.step_batch import Ints
from exgrpo.train.common.success import EPSILON, is_success
from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.config.replay import Prefix
from exgrpo.train.replay.candidates import Candidates, Priority, draw
from exgrpo.train.replay.contract import PlannedGroup
from exgrpo.train.replay.memory import ExperienceMemory
from exgrpo.train.replay.table import Table

CandidateKind = Literal["buffered", "prompts", "stored"]
PREFIXES: dict[Prefix, Callable[[float, np.random.Generator], float]] = {
    "none": lambda steered, rng: 0.0,
    "success": lambda steered, rng: 1.0 - rng.random(),
    "steered": lambda steered, rng: steered,
}
"""Share of a stored answer that is given to a repeated question, as `PlannedGroup.given`, by `experience.prefix`.

success: PrefixRL, arXiv 2601.18795. steered: Prefix Sampling, arXiv 2605.05112, by `ExperienceMemory.given`.
"""


@dataclass(frozen=True)
class Mixture:
    """Sources of questions and their weights.

    Attributes:
        sizes: [S] questions of each source, at least one; the indices of one source follow those of the one before.
        weights: [S] positive shares of the sources among the fresh questions, while all have some left.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]


class FreshQuestions:
    """Questions in random order, epoch after epoch, without the retired ones.

    With a mixture, each source has an order and epochs of its own, and the source of each next question is drawn by
    weight among those that have a question left. Without one, all questions are one source.

    Args:
        questions: N; their indices are 0..N-1.
        rng: draws the orders and the sources.
        mixture: of sources; None: there is one.

    Attributes:
        order: [N] the questions of each source in their random order, one source after the other.
        position: [S] number of questions drawn from each source in its present epoch.
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
        """Draw the next `count` distinct questions that are not excluded, or fewer if no more exist."""
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


def _share(part: float, of: int) -> int:
    # The small term keeps products such as 0.29 * 100 = 28.999999999999996 from losing a question.
    return math.floor(part * of + 1e-9)


@dataclass(frozen=True, eq=False)
class BatchPlanner:
    """Everything `compose` may draw on to plan a step.

    Attributes:
        step: the step to plan.
        batch: B, questions of a step.
        ratio: rho; 0 before replay has begun.
        repeat: share of the fresh groups whose question comes back; 0 before replay has begun.
        options: of the method, and K.
        memory: the experience.
        pool: the fresh questions.
        prioritise: returns the sampling weights of candidates.
        rng: generator of all draws except those of fresh questions.
    """

    step: int
    batch: int
    ratio: float
    repeat: float
    options: MethodOptions
    memory: ExperienceMemory
    pool: FreshQuestions
    prioritise: Callable[[Candidates, MethodOptions], Priority]
    rng: np.random.Generator

    @property
    def samples(self) -> int:
        """K, answers per question."""
        return self.options.samples

    def share(self, of: int) -> int:
        """floor(rho of)."""
        return _share(self.ratio, of)

    def candidates(self, kind: CandidateKind) -> Candidates:
        """Return questions with stored answers, prompts that were asked, or all stored answers."""
        return getattr(self.memory, kind)(self.step)

    def draw(self, kind: CandidateKind, wanted: int) -> Ints:
        """Draw at most `wanted` candidates by their weights: indices of questions, or rows of stored answers."""
        candidates = self.candidates(kind)
        return self.draw_from(candidates, wanted, self.memory.table.rows() if kind == "stored" else candidates.question)

    def draw_from(self, candidates: Candidates, wanted: int, names: Ints) -> Ints:
        """Draw at most `wanted` of the candidates by their weights; return their `names` [len(candidates)]."""
        wanted = min(wanted, len(names))
        if wanted == 0:
            return np.empty(0, np.int64)
        return names[draw(self.rng, len(names), wanted, self.prioritise(candidates, self.options))]

    def earlier(self) -> tuple[Candidates, Ints]:
        """Return the stored answers of earlier steps, and their rows."""
        table = self.memory.table
        before = table.column("step") < self.step
        count = int(np.count_nonzero(before))
        # They were usually stored first: then a slice avoids a copy.
        places = slice(count) if before[:count].all() else np.flatnonzero(before)
        return self.candidates("stored").take(places), table.rows()[places]

    def fresh(self, wanted: int, without: Ints | Sequence[int] = ()) -> list[PlannedGroup]:
        """Plan groups of K answers to at most `wanted` questions that are not retired and not in `without`.

        At most floor(repeat wanted) of them come back, perhaps with a prefix, and are the last.
        """
        excluded = self.memory.retired.copy()
        excluded[np.asarray(without, np.int64)] = True
        back = self._returning(_share(self.repeat, wanted), excluded)
        excluded[back] = True
        new = self.pool.draw(wanted - len(back), excluded).tolist()
        return [*(PlannedGroup(question, self.samples) for question in new), *map(self._again, back.tolist())]

    def _again(self, question: int) -> PlannedGroup:
        """Plan a group that continues a stored answer, if `experience.prefix` gives a share of one that exists."""
        table, again = self.memory.table, PlannedGroup(question, self.samples)
        given = float(PREFIXES[self.options.experience.prefix](self.memory.given[question], self.rng))
        rows = np.array(table.rows_of_question(question) if given else [], np.int64)
        wanted = is_success(table.values("reward", rows), self.options.success) == (given > 0)
        rows = rows[wanted & (table.values("length", rows) > 1)]
        if not len(rows):
            return again
        response = table.response(int(self.rng.choice(rows)))
        # The last token is never given: the policy has one to write.
        size = math.ceil(abs(given) * (len(response) - 1))
        return dataclasses.replace(again, prefix=tuple(response[:size].tolist()), given=given)

    def _returning(self, most: int, excluded: npt.NDArray[np.bool_]) -> Ints:
        """Draw questions whose latest pass rate lies in `band`, `cooldown` steps after they were asked or later."""
        if most == 0:
            return np.empty(0, np.int64)
        options, candidates = self.options.experience, self.candidates("prompts")
        low, high = options.band
        rate = candidates.count / self.samples
        may = (rate >= low - EPSILON) & (rate <= high + EPSILON) & (candidates.age >= options.cooldown)
        may &= ~excluded[candidates.question]
        if options.max_uses is not None:
            may &= candidates.replays < options.max_uses
        places = np.flatnonzero(may)
        return self.draw_from(candidates.take(places), most, candidates.question[places])

    def alone(self, rows: Ints) -> list[PlannedGroup]:
        """Plan a group for each of the stored answers."""
        questions = self.memory.table.values("question", rows)
        return [PlannedGroup(q, 0, rows=(row,)) for q, row in zip(questions.tolist(), rows.tolist(), strict=True)]


def with_stored(planner: BatchPlanner, groups: Sequence[PlannedGroup], most: int) -> list[PlannedGroup]:
    """Let at most `most` stored answers join each of the first floor(rho B) fresh groups, which come last then.

    None joins a group with a prefix, whose answers are compared with one another.
    """
    held, share = planner.memory.table.held, planner.share(planner.batch)
    joined = [0 if group.prefix else min(most, int(held[group.question])) for group in groups[:share]]
    first = [dataclasses.replace(group, choose=several) for group, several in zip(groups, joined, strict=False)]
    return sorted([*first, *groups[len(first) :]], key=lambda group: group.choose > 0)


def draw_groups(planner: BatchPlanner, wanted: int, without: Ints | Sequence[int] = ()) -> list[PlannedGroup]:
    """Draw at most `wanted` whole groups of earlier steps, to questions that are not in `without`.

    The weight of a group is that of its first answer. Two groups to one question may be drawn.
    """
    table = planner.memory.table
    question, step = table.column("question"), table.column("step")
    first = first_of_groups(table)
    first = first[(step[first] < planner.step) & ~np.isin(question[first], without)]
    return groups_at(table, planner.draw_from(planner.candidates("stored").take(first), wanted, first))


def first_of_groups(table: Table) -> Ints:
    """Return the places of the first rows of groups: neighbours with the same question and step are one group."""
    question, step = table.column("question"), table.column("step")
    return np.flatnonzero(np.append(True, (question[1:] != question[:-1]) | (step[1:] != step[:-1]))[: len(question)])


def groups_at(table: Table, places: Ints) -> list[PlannedGroup]:
    """Return the whole stored groups that contain the rows at these places."""
    rows, question, first = table.rows(), table.column("question"), first_of_groups(table)
    numbers = dict.fromkeys((np.searchsorted(first, places, side="right") - 1).tolist())
    ends = np.append(first[1:], len(rows))
    return [
        PlannedGroup(int(question[first[number]]), 0, rows=tuple(rows[first[number] : ends[number]].tolist()))
        for number in numbers
    ]
