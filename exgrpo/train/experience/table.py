"""The stored trajectories as columns: rows are added at the end, and leave in any number and order.

A million rows must not slow a step down: columns are numpy arrays that grow by doubling, rows that have left are only
marked, and those of a question form a chain from the newest to the oldest. Once more than half of the rows have left,
the others are moved together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from exgrpo.train.records import Trajectory

Ints = npt.NDArray[np.int64]
NONE = -1
FEWEST = 1024
"""Rows below which nothing is moved together."""
COLUMNS: dict[str, type[np.generic] | type[object]] = {
    "trajectory": object,
    "question": np.int64,
    "step": np.int64,
    "reward": np.float64,
    "length": np.int64,
    "key": np.int64,
    "advantage": np.float64,
    "successes": np.int64,
    "answers": np.int64,
    "replays": np.int64,
}
"""What is known of a row."""


@dataclass(frozen=True)
class Origin:
    """What a group says of each of its answers when they are stored, and what became of them.

    Attributes:
        advantage: of the answer in its own group.
        successes: m of the group.
        answers: F of the group: the answers that count.
        replays: how often it has been replayed.
    """

    advantage: float = 0.0
    successes: int = 0
    answers: int = 0
    replays: int = 0


class Table:
    """The rows of a memory of some questions; see the module.

    Args:
        questions: number of questions; they are known by index 0..questions-1.

    Attributes:
        held: [questions] how many rows each question has.
    """

    def __init__(self, questions: int) -> None:
        self.held: Ints = np.zeros(questions, np.int64)
        self._newest: Ints = np.full(questions, NONE, np.int64)
        self._columns = {name: np.empty(FEWEST, dtype) for name, dtype in COLUMNS.items()}
        self._older: Ints = np.full(FEWEST, NONE, np.int64)
        self._alive: npt.NDArray[np.bool_] = np.zeros(FEWEST, bool)
        self._size = 0
        self._rows: Ints | None = None

    def __len__(self) -> int:
        return int(self.held.sum())

    def rows(self) -> Ints:
        """[N] the rows that are there, oldest first."""
        if self._rows is None:
            self._rows = np.flatnonzero(self._alive[: self._size])
        return self._rows

    def column(self, name: str) -> npt.NDArray:
        """[N] one of `COLUMNS`, of `rows`."""
        rows, column = self.rows(), self._columns[name]
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1:  # without gaps there is nothing to gather
            return column[rows[0] : rows[-1] + 1]
        return column[rows]

    def values(self, name: str, rows: Ints) -> npt.NDArray:
        """[len(rows)] one of `COLUMNS`, of some rows."""
        return self._columns[name][rows]

    def trajectory(self, row: int) -> Trajectory:
        """Of a row."""
        return self._columns["trajectory"][row]

    def origin(self, row: int) -> Origin:
        """Of a row."""
        of_row = (self._columns[name][row].item() for name in ("advantage", "successes", "answers", "replays"))
        return Origin(*of_row)

    def of_question(self, question: int) -> list[int]:
        """The rows of a question, oldest first."""
        return list(self._chain(question))[::-1]

    def newest(self, questions: Ints) -> Ints:
        """[len(questions)] the newest row of each question, which has one."""
        return self._newest[questions]

    def _chain(self, question: int) -> Iterator[int]:
        row = int(self._newest[question])
        while row != NONE:
            if self._alive[row]:
                yield row
            row = int(self._older[row])

    def add(self, trajectory: Trajectory, origin: Origin) -> int:
        """Store a trajectory; returns its row."""
        row, question = self._size, trajectory.question
        if row == len(self._alive):
            self._grow()
        values = (
            trajectory,
            question,
            trajectory.step,
            trajectory.reward,
            len(trajectory.response),
            trajectory.key,
            origin.advantage,
            origin.successes,
            origin.answers,
            origin.replays,
        )
        for column, value in zip(self._columns.values(), values, strict=True):
            column[row] = value
        self._older[row], self._alive[row] = self._newest[question], True
        self._newest[question] = row
        self.held[question] += 1
        self._size += 1
        self._rows = None
        return row

    def _grow(self) -> None:
        room = len(self._alive)
        for name, column in self._columns.items():
            self._columns[name] = np.concatenate([column, np.empty(room, column.dtype)])
        self._older = np.concatenate([self._older, np.full(room, NONE, np.int64)])
        self._alive = np.concatenate([self._alive, np.zeros(room, bool)])

    def remove(self, rows: Sequence[int] | Ints) -> None:
        """Let rows go that are there, each named once."""
        if not len(rows):
            return
        gone = np.asarray(rows, np.int64)
        self._alive[gone] = False
        self._columns["trajectory"][gone] = None
        questions = self._columns["question"][gone]
        np.subtract.at(self.held, questions, 1)
        self._rows = None
        for question in np.unique(questions).tolist():
            self._newest[question] = next(self._chain(question), NONE)

    def replayed(self, rows: Ints) -> Ints:
        """Count a replay of each of some rows; returns how many each has had by now."""
        np.add.at(self._columns["replays"], rows, 1)
        return self._columns["replays"][rows]

    def tidy(self) -> None:
        """Move the rows together where more than half of them have left. Rows get other numbers then."""
        rows = self.rows()
        if self._size < FEWEST or 2 * len(rows) >= self._size:
            return
        for name, column in self._columns.items():
            kept = column[rows]
            column[: len(rows)] = kept
            if name == "trajectory":
                column[len(rows) :] = None
        self._alive[:] = False
        self._alive[: len(rows)] = True
        self._size, self._rows = len(rows), None
        self._link()

    def _link(self) -> None:
        """The chains of all questions, of rows without gaps."""
        question = self._columns["question"][: self._size]
        order = np.argsort(question, kind="stable")
        self._older[: self._size] = NONE
        same = question[order[1:]] == question[order[:-1]]
        self._older[order[1:][same]] = order[:-1][same]
        self._newest[:] = NONE
        self._newest[question[order]] = order  # of equal ones the last, which is the newest

    def fill(self, trajectories: Sequence[Trajectory], origins: dict[str, npt.NDArray]) -> None:
        """Replace all rows.

        Args:
            trajectories: [N], oldest first.
            origins: [N] each field of `Origin`, by name.
        """
        size = len(trajectories)
        room = max(FEWEST, size)
        own = {
            "question": [one.question for one in trajectories],
            "step": [one.step for one in trajectories],
            "reward": [one.reward for one in trajectories],
            "length": [len(one.response) for one in trajectories],
            "key": [one.key for one in trajectories],
        }
        for name, dtype in COLUMNS.items():
            self._columns[name] = np.empty(room, dtype)
            if name == "trajectory":
                self._columns[name][:size] = trajectories
            else:
                self._columns[name][:size] = own.get(name, origins.get(name))
        self._older, self._alive = np.full(room, NONE, np.int64), np.zeros(room, bool)
        self._alive[:size] = True
        self._size, self._rows = size, None
        self.held = np.bincount(self.column("question"), minlength=len(self.held))
        self._link()
