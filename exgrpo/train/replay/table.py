"""The buffer: stored answers as flat columns; rows are added at the end, and leave in any number and order.

A million rows must not slow a step down: columns grow by doubling, rows that have left are only marked, and those of a
question form a chain from the newest to the oldest. The tokens of rows lie end to end in the order of the rows. Once
more than half of the rows or of their tokens have left, the others are moved together.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from exgrpo.train.common.columns import Axis, Ints, columns_of
from exgrpo.train.common.records import AllowedTokens, TokenIds
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.replay.flat import FlatArray, TokenColumns

NONE = -1
FEWEST = 1024
"""Rows below which nothing is moved together."""
PIECE = 1 << 12
"""Rows that are moved at once."""
PREFIX, SIZES = "answer.", ".sizes"
"""Beginning of the names of stored columns among the arrays of a checkpoint; end of those of the sizes of sets."""


class Table:
    """The rows of a memory of some questions; see the module.

    Args:
        questions: number of questions; they are known by index 0..questions-1.
        folder: of files that hold the tokens; None: tokens are in RAM.

    Attributes:
        held: [questions] how many rows each question has.
        tokens: of all rows, also of those that have left.
    """

    def __init__(self, questions: int, folder: Path | None = None) -> None:
        self.held: Ints = np.zeros(questions, np.int64)
        self._numbered = 0
        self._newest: Ints = np.full(questions, NONE, np.int64)
        self._clear(folder)

    def _clear(self, folder: Path | None) -> None:
        self.held[:], self._newest[:] = 0, NONE
        self.tokens, self._living = TokenColumns(folder), 0
        dtypes = {name: column.dtype for name, column in columns_of("group", "row", stored=True).items()}
        dtypes |= {"length": np.int64, "start": np.int64, "number": np.int64}
        self._columns = {name: FlatArray(np.empty(0, dtype)) for name, dtype in dtypes.items()}
        self._alive, self._older = FlatArray(np.empty(0, bool)), FlatArray(np.empty(0, np.int64))
        self._rows: Ints | None = None

    def __len__(self) -> int:
        return int(self.held.sum())

    def rows(self) -> Ints:
        """Return the rows [N] that are there, oldest first."""
        if self._rows is None:
            self._rows = np.flatnonzero(self._alive.values)
        return self._rows

    def column(self, name: str) -> npt.NDArray:
        """Return a column of `rows` [N], by name."""
        rows, column = self.rows(), self._columns[name].values
        return column[rows[0] : rows[-1] + 1] if self._without_gaps() else column[rows]

    def _without_gaps(self) -> bool:
        """True if rows are neighbours, so that there is nothing to gather."""
        rows = self.rows()
        return len(rows) > 0 and rows[-1] - rows[0] == len(rows) - 1

    def values(self, name: str, rows: Ints) -> npt.NDArray:
        """Return a column of some rows."""
        return self._columns[name].values[rows]

    def value(self, name: str, row: int) -> Any:
        """Return the value of a column in a row, as a plain number."""
        return self._columns[name].values.item(row)

    def response(self, row: int) -> TokenIds:
        """Return the token ids [R] of a row."""
        start = self.value("start", row)
        return self.tokens.read("token", start, start + self.value("length", row))

    def stored(self) -> StepBatch:
        """Return all of them in the order of `rows`, each a group of its own, whatever leaves or joins later."""
        start, length = self.column("start"), self.column("length")
        tokens, first = (self.tokens, int(start[0])) if self._without_gaps() else (self._kept(), 0)
        names = columns_of("row", stored=True)
        return whole_batch(
            self.column("question").copy(),
            length.copy(),
            {name: self.column(name).copy() for name in names} | tokens.part(first, first + int(length.sum())),
        )

    def _kept(self) -> TokenColumns:
        """Return the tokens of the rows that are there, moved together."""
        kept = TokenColumns(self.tokens.folder)
        for first in range(0, len(self._alive.values), PIECE):
            start, length, alive = (
                column.values[first : first + PIECE]
                for column in (self._columns["start"], self._columns["length"], self._alive)
            )
            there = np.repeat(alive, length)
            part = self.tokens.part(int(start[0]), int(start[-1] + length[-1]))
            kept.append({name: values[there] for name, values in part.items()}, int(np.count_nonzero(there)))
        return kept

    def answers(self, rows: Ints, group: Ints, question: Ints) -> StepBatch:
        """Return some rows as replayed answers of a batch, without `advantage`, which counts in another group now.

        Args:
            rows: [N] in the order of their groups.
            group: [N] number of the group of each.
            question: [G] of each group.
        """
        names = [*columns_of("row", stored=True), "number"]
        of_rows = {name: self.values(name, rows) for name in names if name != "advantage"}
        length = self.values("length", rows)
        tokens = self.tokens.gather(self.values("start", rows), length)
        batch = StepBatch(question, group, length, replayed=np.ones(len(rows), bool), **of_rows, **tokens)
        return _completed(batch, "token")

    def holds(self, question: int, row: int) -> bool:
        """Return True if a row >= 0 is there and answers this question."""
        return (
            row < len(self._alive.values) and bool(self._alive.values[row]) and self.value("question", row) == question
        )

    def rows_of_question(self, question: int) -> list[int]:
        """Return the rows of a question, oldest first."""
        return list(self._chain(question))[::-1]

    def newest(self, questions: Ints) -> Ints:
        """Return the newest row of each of some questions that have one."""
        return self._newest[questions]

    def _chain(self, question: int) -> Iterator[int]:
        row, alive, older = int(self._newest[question]), self._alive.values, self._older.values
        while row != NONE:
            if alive[row]:
                yield row
            row = int(older[row])

    def add(self, batch: StepBatch, **columns: npt.NDArray) -> Ints:
        """Store the N rows of a batch and return their numbers here.

        Args:
            batch: answers that each have a token; a column that it lacks has its default.
            columns: [N] in the place of those of the batch.
        """
        first, question = len(self._alive.values), batch.question[batch.group]
        found = {name: batch.column(name) for name in columns_of("row", stored=True) if name not in columns} | columns
        found |= {"question": question, "length": batch.length, "start": batch.start[:-1] + self.tokens.size}
        found["number"] = self._numbered + np.arange(len(batch))
        self._numbered += len(batch)
        for name, column in self._columns.items():
            column.append(found[name])
        tokens = {name: getattr(batch, name) for name in columns_of("token", stored=True) if batch.has(name)}
        self.tokens.append(tokens, int(batch.start[-1]))
        self._living += int(batch.start[-1])
        self._alive.append(np.ones(len(batch), bool))
        self._link(question)
        np.add.at(self.held, question, 1)
        self._rows = None
        return np.arange(first, len(self._alive.values))

    def _link(self, question: Ints) -> None:
        """Add rows of these questions [N] to the chains."""
        order = np.argsort(question, kind="stable")
        rows, question = order + len(self._older.values), question[order]
        first = np.append(True, question[1:] != question[:-1])[: len(order)]
        older = np.empty(len(order), np.int64)
        older[order] = np.where(first, self._newest[question], np.roll(rows, 1))
        self._older.append(older)
        self._newest[question] = rows  # of equal ones the last, which is the newest

    def remove(self, rows: Sequence[int] | Ints) -> None:
        """Let rows go that are there, each named once."""
        if not len(rows):
            return
        gone = np.asarray(rows, np.int64)
        self._alive.values[gone] = False
        self._living -= int(self.values("length", gone).sum())
        questions = self.values("question", gone)
        np.subtract.at(self.held, questions, 1)
        self._rows = None
        for question in np.unique(questions).tolist():
            self._newest[question] = next(self._chain(question), NONE)

    def replace(self, rows: Sequence[int], newer: int) -> None:
        """Let rows go for a newer one, which has been replayed as often as they have."""
        self._columns["replays"].values[newer] += self.values("replays", np.asarray(rows, np.int64)).sum()
        self.remove(rows)

    def replayed(self, rows: Ints) -> Ints:
        """Count a replay of each of some rows, and return how many each has had by now."""
        np.add.at(self._columns["replays"].values, rows, 1)
        return self.values("replays", rows)

    def numbered(self, numbers: Ints) -> Ints:
        """Return the rows with these values of `number` [N], which they keep when they move; `NONE` of those gone."""
        known = self._columns["number"].values
        rows = np.searchsorted(known, numbers)
        there = rows < len(known)
        there[there] = (known[rows[there]] == numbers[there]) & self._alive.values[rows[there]]
        return np.where(there, rows, NONE)

    def put(self, rows: Ints, **columns: npt.NDArray) -> None:
        """Replace values [N] of some rows."""
        for name, values in columns.items():
            self._columns[name].values[rows] = values

    def tidy(self) -> None:
        """Move the rows together where more than half of them, or of their tokens, have left.

        Then rows are at other places, but keep their `number`.
        """
        few = 2 * len(self.rows()) < len(self._alive.values) or 2 * self._living < self.tokens.size
        if len(self._alive.values) >= FEWEST and few:
            numbers = self.column("number").copy()
            self.fill(self.stored())
            self._columns["number"].values[:] = numbers

    def fill(self, answers: StepBatch) -> None:
        """Replace all rows by those of a batch, oldest first; in RAM, the tokens are not copied."""
        self._clear(self.tokens.folder)
        self.add(answers)


def whole_batch(question: Ints, length: Ints, columns: Mapping[str, Any]) -> StepBatch:
    """Return stored answers [N], each a group of its own; missing columns have their defaults, sets may be missing."""
    return _completed(StepBatch(question, np.arange(len(length)), length, **columns), "row", "token")


def _completed(batch: StepBatch, *axes: Axis) -> StepBatch:
    missing = {name: one for name, one in columns_of(*axes, stored=True).items() if not batch.has(name)}
    batch.fill(**{name: batch.column(name) for name, one in missing.items() if one.dtype is not AllowedTokens})
    return batch


def packed(answers: StepBatch) -> dict[str, npt.NDArray]:
    """Return the stored columns of answers, each a group of its own, as arrays for `unpacked`.

    A column without any value but its default is missing.
    """
    arrays: dict[str, npt.NDArray] = {f"{PREFIX}length": answers.length}
    for name, column in columns_of("group", "row", "token", stored=True).items():
        values = answers.column(name)
        if column.is_default(values):
            continue
        if isinstance(values, AllowedTokens):
            arrays[f"{PREFIX}{name}{SIZES}"], values = values.sizes.astype(np.int32), values.ids
        arrays[f"{PREFIX}{name}"] = values
    return arrays


def unpacked(arrays: Mapping[str, npt.NDArray]) -> StepBatch:
    """Return the answers of `packed`, which may be among other arrays."""
    found = with_sets({n.removeprefix(PREFIX): one for n, one in arrays.items() if n.startswith(PREFIX)})
    length = found.pop("length")
    return whole_batch(found.pop("question", np.zeros_like(length)), length, found)


def with_sets(columns: Mapping[str, npt.NDArray]) -> dict[str, Any]:
    """Return columns by name; sets are made of their ids and their sizes."""
    sizes = {name.removesuffix(SIZES): values for name, values in columns.items() if name.endswith(SIZES)}
    found = {name: values for name, values in columns.items() if not name.endswith(SIZES)}
    return found | {name: AllowedTokens.from_sizes(values, found[name]) for name, values in sizes.items()}
