"""The buffer: stored answers as columns; rows are added at the end, and leave in any number and order.

A million rows must not slow a step down: columns are flat arrays that grow by doubling, rows that have left are only
marked, and those of a question form a chain from the newest to the oldest. Once more than half of the rows have left,
the others are moved together.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from exgrpo.train.common.columns import LOG_PROB_SOURCES, Ints, columns_of
from exgrpo.train.common.records import TokenIds, Trajectory
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.replay.blocks import Places, TokenBlock, TokenBlocks, gather

NONE = -1
FEWEST = 1024
"""Rows below which nothing is moved together."""


@dataclass(frozen=True, eq=False)
class Stored:
    """N stored answers as they are at one moment, whatever leaves or joins later.

    Attributes:
        columns: [N] each stored column of rows, and `Places`, by name.
        blocks: the blocks that hold the tokens.
    """

    columns: Mapping[str, npt.NDArray]
    blocks: Mapping[int, TokenBlock]

    def __len__(self) -> int:
        return len(self.columns["length"])

    def __getitem__(self, row: int) -> Trajectory:
        block, start, length = (self.columns[name].item(row) for name in Places._fields)
        tokens = {
            n: self.blocks[block].part(n, start, start + length)
            for n in ("token", "old_log_prob", "response_mask", "allowed_tokens")
        }
        plain = ("question", "finished", "reward", "step", "key", "penalty")
        return Trajectory(
            response=tokens["token"],
            log_prob=tokens["old_log_prob"],
            response_mask=None if tokens["response_mask"].all() else tokens["response_mask"],
            allowed_tokens=tokens["allowed_tokens"] if len(tokens["allowed_tokens"].ids) else None,
            old_log_probs_from=LOG_PROB_SOURCES[self.columns["old_log_probs_from"][row]],
            **{name: self.columns[name].item(row) for name in plain},
        )

    @property
    def places(self) -> Places:
        """[N] where the tokens lie."""
        return Places(*(self.columns[name] for name in Places._fields))

    def tokens(self, rows: npt.NDArray) -> dict[str, Any]:
        """Return the columns of tokens of some of them, end to end."""
        return gather(self.blocks, Places(*(column[rows] for column in self.places)))


def pack(trajectories: Sequence[Trajectory], folder: Path | None = None, **columns: Any) -> Stored:
    """Return trajectories [N] as they are stored, with further columns [N] or [T]; raises as `TokenBlock.append`."""
    table = Table(max((one.question for one in trajectories), default=-1) + 1, folder)
    table.add(StepBatch.from_trajectories(trajectories, **columns))
    return table.stored()


class Table:
    """The rows of a memory of some questions; see the module.

    Args:
        questions: number of questions; they are known by index 0..questions-1.
        folder: of files that hold the tokens; None: tokens are in RAM.

    Attributes:
        held: [questions] how many rows each question has.
        blocks: the tokens.
    """

    def __init__(self, questions: int, folder: Path | None = None) -> None:
        self.held: Ints = np.zeros(questions, np.int64)
        self._newest: Ints = np.full(questions, NONE, np.int64)
        self.blocks = TokenBlocks(folder)
        dtypes = {name: column.dtype for name, column in columns_of("group", "row", stored=True).items()}
        dtypes |= dict.fromkeys(Places._fields, np.int64)
        self._hold({name: np.empty(0, dtype) for name, dtype in dtypes.items()}, 0)

    def _hold(self, columns: Mapping[str, npt.NDArray], size: int) -> None:
        """Replace all rows by those of columns, without gaps, and link the chains of all questions."""
        room = max(FEWEST, size)
        self._columns = {name: _resized(column, room) for name, column in columns.items()}
        self._alive, self._older = np.arange(room) < size, np.full(room, NONE, np.int64)
        self._size = size
        self._rows: Ints | None = None
        question = self._columns["question"][:size]
        order = np.argsort(question, kind="stable")
        same = question[order[1:]] == question[order[:-1]]
        self._older[order[1:][same]] = order[:-1][same]
        self._newest[:] = NONE
        self._newest[question[order]] = order  # of equal ones the last, which is the newest

    def __len__(self) -> int:
        return int(self.held.sum())

    def rows(self) -> Ints:
        """Return the rows [N] that are there, oldest first."""
        if self._rows is None:
            self._rows = np.flatnonzero(self._alive[: self._size])
        return self._rows

    def column(self, name: str) -> npt.NDArray:
        """Return a column of `rows` [N], by name."""
        rows, column = self.rows(), self._columns[name]
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1:  # without gaps there is nothing to gather
            return column[rows[0] : rows[-1] + 1]
        return column[rows]

    def values(self, name: str, rows: Ints) -> npt.NDArray:
        """Return a column of some rows."""
        return self._columns[name][rows]

    def value(self, name: str, row: int) -> Any:
        """Return the value of a column in a row, as a plain number."""
        return self._columns[name].item(row)

    def response(self, row: int) -> TokenIds:
        """Return the token ids [R] of a row."""
        start = self.value("start", row)
        return self.blocks.contents[self.value("block", row)].part("token", start, start + self.value("length", row))

    def stored(self) -> Stored:
        """Return all of them, in the order of `rows`."""
        return Stored({name: self.column(name).copy() for name in self._columns}, dict(self.blocks.contents))

    def answers(self, rows: Ints, group: Ints, question: Ints) -> StepBatch:
        """Return some rows as replayed answers of a batch, without `advantage`, which counts in another group now.

        Args:
            rows: [N] in the order of their groups.
            group: [N] number of the group of each.
            question: [G] of each group.
        """
        of_rows = {name: self.values(name, rows) for name in columns_of("row", stored=True) if name != "advantage"}
        tokens = gather(self.blocks.contents, self._places(rows))
        replayed = np.ones(len(rows), bool)
        return StepBatch(question, group, self.values("length", rows), replayed=replayed, **of_rows, **tokens)

    def holds(self, question: int, row: int) -> bool:
        """Return True if a row >= 0 is there and answers this question."""
        return row < self._size and bool(self._alive[row]) and self.value("question", row) == question

    def rows_of_question(self, question: int) -> list[int]:
        """Return the rows of a question, oldest first."""
        return list(self._chain(question))[::-1]

    def newest(self, questions: Ints) -> Ints:
        """Return the newest row of each of some questions that have one."""
        return self._newest[questions]

    def _chain(self, question: int) -> Iterator[int]:
        row = int(self._newest[question])
        while row != NONE:
            if self._alive[row]:
                yield row
            row = int(self._older[row])

    def add(self, batch: StepBatch, **columns: npt.NDArray) -> Ints:
        """Store the N rows of a batch and return their numbers here.

        Args:
            batch: answers that each have a token; a column that it lacks has its default.
            columns: [N] in the place of those of the batch.
        """
        first, self._size = self._size, self._size + len(batch)
        if self._size > len(self._alive):
            self._grow()
        tokens = {name: getattr(batch, name) for name in columns_of("token", stored=True) if batch.has(name)}
        found = {name: batch.column(name) for name in columns_of("row", stored=True) if name not in columns}
        question = found["question"] = batch.question[batch.group]
        found |= {**columns, **self.blocks.extend(tokens, batch.length)._asdict()}
        for name, column in self._columns.items():
            column[first : self._size] = found[name]
        for row, of_row in enumerate(question.tolist(), first):
            self._older[row], self._newest[of_row] = self._newest[of_row], row
        self._alive[first : self._size] = True
        np.add.at(self.held, question, 1)
        self._rows = None
        return np.arange(first, self._size)

    def _grow(self) -> None:
        room = max(2 * len(self._alive), self._size)
        self._columns = {name: _resized(column, room) for name, column in self._columns.items()}
        self._older, self._alive = _resized(self._older, room), _resized(self._alive, room)

    def remove(self, rows: Sequence[int] | Ints) -> None:
        """Let rows go that are there, each named once."""
        if not len(rows):
            return
        gone = np.asarray(rows, np.int64)
        self._alive[gone] = False
        self.blocks.release(self._places(gone))
        questions = self._columns["question"][gone]
        np.subtract.at(self.held, questions, 1)
        self._rows = None
        for question in np.unique(questions).tolist():
            self._newest[question] = next(self._chain(question), NONE)

    def replace(self, rows: Sequence[int], newer: int) -> None:
        """Let rows go for a newer one, which has been replayed as often as they have."""
        self._columns["replays"][newer] += self.values("replays", np.asarray(rows, np.int64)).sum()
        self.remove(rows)

    def replayed(self, rows: Ints) -> Ints:
        """Count a replay of each of some rows, and return how many each has had by now."""
        np.add.at(self._columns["replays"], rows, 1)
        return self._columns["replays"][rows]

    def _places(self, rows: Ints) -> Places:
        return Places(*(self._columns[name][rows] for name in Places._fields))

    def tidy(self) -> None:
        """Move the rows together where more than half of them have left, and so with tokens.

        Rows get other numbers then.
        """
        rows = self.rows()
        if self._size >= FEWEST and 2 * len(rows) < self._size:
            self._hold({name: column[rows] for name, column in self._columns.items()}, len(rows))
        self._move_tokens()

    def _move_tokens(self) -> None:
        """Write the tokens of blocks again that hold few."""
        if not (sparse := self.blocks.sparse()):
            return
        rows = self.rows()
        rows = rows[np.isin(self._columns["block"][rows], sparse)]
        places = self._places(rows)
        moved = self.blocks.extend(gather(self.blocks.contents, places), places.length)
        self.blocks.release(places)
        for name, values in moved._asdict().items():
            self._columns[name][rows] = values

    def fill(self, stored: Stored) -> None:
        """Replace all rows by N answers, oldest first; tokens are not copied."""
        self._hold({name: stored.columns[name] for name in self._columns}, len(stored))
        self.blocks.adopt(stored.blocks, stored.places)
        self.held = np.bincount(self.column("question"), minlength=len(self.held))


def _resized(column: npt.NDArray, room: int) -> npt.NDArray:
    """Return a copy with room for more; the system gives memory to room when it is used."""
    copy = np.zeros(room, column.dtype)
    copy[: len(column)] = column
    return copy
