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
from exgrpo.train.common.records import AllowedTokens, Mask, TokenIds
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.replay.flat import FlatArray, TokenColumns

NONE = -1
FEWEST = 1024
"""Rows below which nothing is moved together."""
PIECE = 1 << 12
"""Rows that are moved at once."""
PREFIX, SIZES = "answer.", ".sizes"
"""Beginning of the names of stored columns among the arrays of a checkpoint; end of those of the sizes of sets."""
LENGTH = f"{PREFIX}length"
"""Name of the answers' numbers of tokens among those arrays, which always have it."""


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
        dtypes |= dict.fromkeys(("length", "start", "older", "number"), np.int64) | {"alive": np.bool_}
        self._columns = {name: FlatArray(np.empty(0, dtype)) for name, dtype in dtypes.items()}
        self._rows: Ints | None = None

    def __len__(self) -> int:
        return int(self.held.sum())

    @property
    def _alive(self) -> Mask:
        """True for each row that has not left."""
        return self._columns["alive"].values

    def rows(self) -> Ints:
        """Return the rows [N] that are there, oldest first."""
        if self._rows is None:
            self._rows = np.flatnonzero(self._alive)
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
        tokens, first = (self.tokens, int(self.column("start")[0])) if self._without_gaps() else (self._kept(), 0)
        rows = {name: self.column(name).copy() for name in ("question", "length", *columns_of("row", stored=True))}
        return _whole_batch(**rows, **tokens.part(first, first + int(rows["length"].sum())))

    def _kept(self) -> TokenColumns:
        """Return the tokens of the rows that are there, moved together."""
        kept, start, length = TokenColumns(self.tokens.folder), self.column("start"), self.column("length")
        for first in range(0, len(start), PIECE):
            piece = slice(first, first + PIECE)
            kept.append(self.tokens.gather(start[piece], length[piece]), int(length[piece].sum()))
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
        return row < len(self._alive) and bool(self._alive[row]) and self.value("question", row) == question

    def rows_of_question(self, question: int) -> list[int]:
        """Return the rows of a question, oldest first."""
        return list(self._chain(question))[::-1]

    def newest(self, questions: Ints) -> Ints:
        """Return the newest row of each of some questions that have one."""
        return self._newest[questions]

    def _chain(self, question: int) -> Iterator[int]:
        row, alive, older = int(self._newest[question]), self._alive, self._columns["older"].values
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
        rows, question = len(self._alive) + np.arange(len(batch)), batch.question[batch.group]
        found = {name: batch.column(name) for name in columns_of("row", stored=True) if name not in columns} | columns
        found |= {"question": question, "length": batch.length, "start": batch.start[:-1] + self.tokens.size}
        found |= {"older": self._link(rows, question), "alive": np.ones(len(batch), bool)}
        found["number"] = self._numbered + np.arange(len(batch))
        self._numbered += len(batch)
        for name, column in self._columns.items():
            column.append(found[name])
        tokens = {name: getattr(batch, name) for name in columns_of("token", stored=True) if batch.has(name)}
        self.tokens.append(tokens, int(batch.start[-1]))
        self._living += int(batch.start[-1])
        np.add.at(self.held, question, 1)
        self._rows = None
        return rows

    def _link(self, rows: Ints, question: Ints) -> Ints:
        """Put new rows [N] at the front of the chains of their questions [N]; return the next older row of each."""
        order = np.argsort(question, kind="stable")
        rows, question = rows[order], question[order]
        first = np.append(True, question[1:] != question[:-1])[: len(order)]
        older = np.empty(len(order), np.int64)
        older[order] = np.where(first, self._newest[question], np.roll(rows, 1))
        self._newest[question] = rows  # of equal ones the last, which is the newest
        return older

    def remove(self, rows: Sequence[int] | Ints) -> None:
        """Let rows go that are there, each named once."""
        if not len(rows):
            return
        gone = np.asarray(rows, np.int64)
        self._alive[gone] = False
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
        there[there] = (known[rows[there]] == numbers[there]) & self._alive[rows[there]]
        return np.where(there, rows, NONE)

    def put(self, rows: Ints, **columns: npt.NDArray) -> None:
        """Replace values [N] of some rows."""
        for name, values in columns.items():
            self._columns[name].values[rows] = values

    def tidy(self) -> None:
        """Move the rows together where more than half of them, or of their tokens, have left.

        Then rows are at other places, but keep their `number`.
        """
        few = 2 * len(self.rows()) < len(self._alive) or 2 * self._living < self.tokens.size
        if len(self._alive) >= FEWEST and few:
            numbers = self.column("number").copy()
            self.fill(self.stored())
            self._columns["number"].values[:] = numbers

    def fill(self, answers: StepBatch) -> None:
        """Replace all rows by those of a batch, oldest first; in RAM, the tokens are not copied."""
        self._clear(self.tokens.folder)
        self.add(answers)


def packed(answers: StepBatch) -> dict[str, npt.NDArray]:
    """Return the stored columns of answers, each a group of its own, as arrays for `unpacked`.

    A column without any value but its default is missing.
    """
    arrays: dict[str, npt.NDArray] = {LENGTH: answers.length}
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
    found: dict[str, Any] = {n.removeprefix(PREFIX): one for n, one in arrays.items() if n.startswith(PREFIX)}
    for name in [name.removesuffix(SIZES) for name in found if name.endswith(SIZES)]:
        found[name] = AllowedTokens.from_sizes(found.pop(f"{name}{SIZES}"), found[name])
    return _whole_batch(**{"question": np.zeros_like(found["length"]), **found})


def _whole_batch(question: Ints, length: Ints, **columns: Any) -> StepBatch:
    """Return stored answers [N], each a group of its own; missing columns have their defaults, sets may be missing."""
    return _completed(StepBatch(question, np.arange(len(length)), length, **columns), "row", "token")


def _completed(batch: StepBatch, *axes: Axis) -> StepBatch:
    missing = {name: one for name, one in columns_of(*axes, stored=True).items() if not batch.has(name)}
    batch.fill(**{name: batch.column(name) for name, one in missing.items() if one.dtype is not AllowedTokens})
    return batch
