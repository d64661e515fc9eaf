"""The one record of a training step: all of its answers as columns, which the stages of the step fill.

G groups of answers to one question each, N rows (answers), T response tokens of all rows, end to end. Rows come in the
order of their groups, and the fresh ones of a group before the replayed ones.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from exgrpo.train.common.columns import (
    COLUMNS,
    ENGINE,
    LOG_PROB_SOURCES,
    TRAINER,
    AnswerColumns,
    Axis,
    Doubles,
    Floats,
    Ints,
    Objects,
    columns_of,
)
from exgrpo.train.common.records import AllowedTokens, Counts, Mask, Rollout, TokenIds
from exgrpo.train.common.success import EPSILON

__all__ = ["ENGINE", "LOG_PROB_SOURCES", "SCORES", "TRAINER", "Doubles", "Floats", "Ints", "Objects", "StepBatch"]

SCORES = ("old_log_prob", "log_prob", "entropy")
"""AnswerColumns that the trainer computes of fresh rows, and only of those whose numbers something needs."""


class StepBatch(AnswerColumns):
    """The answers of a step. What its columns hold, `AnswerColumns` says; G, N and T, the module.

    A column that no stage has filled cannot be read. In one that is filled for some rows only, the others have its
    default.

    Args:
        question: [G] index of the question of each group.
        group: [N] as the attribute.
        length: [N] as the attribute.
        columns: as `fill` takes them.

    Attributes:
        group: [N] number of its group, rising.
        length: [N] its response tokens.
        start: [N + 1] where the tokens of each row begin, and the end of the last one.
        trained: the numbers of the groups that are trained on, in the order in which mini-batches deal them.
        counts: what it took to generate and grade the fresh answers.
    """

    trained: Ints
    counts: Counts

    def __init__(self, question: Ints, group: Ints, length: Ints, **columns: Any) -> None:
        self.group, self.length = np.asarray(group, np.int64), np.asarray(length, np.int64)
        self.start = np.concatenate([[0], np.cumsum(self.length)])
        self._sizes = (len(question), len(self.group), int(self.start[-1]))
        self.fill(question=question, **columns)

    @classmethod
    def from_rollouts(cls, question: Sequence[int], counts: Sequence[int], rollouts: Sequence[Rollout]) -> "StepBatch":
        """Return fresh answers as a batch, as an engine gives them.

        Args:
            question: [G] index of the question of each group.
            counts: [G] answers to each.
            rollouts: [N] in the order of their groups.
        """
        length = [len(rollout.response) for rollout in rollouts]
        allowed_tokens = AllowedTokens.from_parts([rollout.allowed_tokens for rollout in rollouts], length)
        return cls(
            np.asarray(question, np.int64),
            np.repeat(np.arange(len(counts)), np.asarray(counts, np.int64)),
            np.asarray(length, np.int64),
            replayed=np.zeros(len(rollouts), bool),
            replays=np.zeros(len(rollouts), np.int64),
            finished=[rollout.finished for rollout in rollouts],
            token=_flat([rollout.response for rollout in rollouts], length, np.int32, 0),
            response_mask=_flat([rollout.response_mask for rollout in rollouts], length, bool, True),
            engine_log_prob=_flat([rollout.log_prob for rollout in rollouts], length, np.float32, np.nan),
            engine_entropy=_flat([rollout.entropy for rollout in rollouts], length, np.float32, np.nan),
            **({} if allowed_tokens is None else {"allowed_tokens": allowed_tokens}),
        )

    @classmethod
    def from_answers(cls, prompts: Sequence[TokenIds], rollouts: Sequence[Rollout]) -> "StepBatch":
        """Return a batch of [N] answers to [N] prompts, to be scored; equal prompts are one question."""
        numbers: dict[bytes, int] = {}
        question = [numbers.setdefault(prompt.tobytes(), len(numbers)) for prompt in prompts]
        batch = cls.from_rollouts(question, [1] * len(prompts), rollouts)
        batch.fill(prompt=prompts)
        return batch

    def fill(self, **columns: Any) -> None:
        """Set whole columns, by name, or `trained` and `counts`.

        Raises:
            ValueError: a column has another length than its rows, groups or tokens.
        """
        for name, values in columns.items():
            if name in COLUMNS:
                values = COLUMNS[name].array(values)
                if values.shape != (self._size(name),):
                    raise ValueError(f"{name}: expected [{self._size(name)}], got {list(values.shape)}")
            setattr(self, name, values)

    def put(self, rows: Ints, **columns: npt.NDArray) -> None:
        """Set the tokens of some rows in columns of tokens; what is new is NaN in other rows, and 1 in `factor`."""
        places = self.places(rows)
        for name, values in columns.items():
            if name not in vars(self):
                self.fill(**{name: self.column(name)})
            getattr(self, name)[places] = values

    def without(self, *names: str) -> "StepBatch":
        """Return these rows without some columns, which cannot be read then."""
        part = copy.copy(self)
        for name in names:
            vars(part).pop(name, None)
        return part

    def _size(self, name: str) -> int:
        return self._sizes[("group", "row", "token").index(COLUMNS[name].axis)]

    def __getattr__(self, name: str) -> Any:
        if name in COLUMNS or name in ("trained", "counts"):
            raise AttributeError(f"the column {name} of the batch is not filled yet", name=name, obj=self)
        raise AttributeError(f"a StepBatch has no {name}", name=name, obj=self)

    def has(self, name: str) -> bool:
        """Return True if a column is filled."""
        return name in vars(self)

    def __len__(self) -> int:
        return self._sizes[1]

    @property
    def groups(self) -> int:
        """G."""
        return self._sizes[0]

    @property
    def fresh(self) -> Mask:
        """[N] whether the answer was written in this step."""
        return ~self.replayed

    @property
    def unaided(self) -> Mask:
        """[N] whether the answer was written in this step, from its first token on."""
        return self.fresh & (self.column("given") == 0)

    @property
    def net_reward(self) -> Doubles:
        """[N] what counts in advantages."""
        return self.reward - self.penalty

    @property
    def has_signal(self) -> Mask:
        """[G] whether the net rewards of a group differ, so that its answers have advantages."""
        high, low = np.full(self.groups, -np.inf), np.full(self.groups, np.inf)
        np.maximum.at(high, self.group, self.net_reward)
        np.minimum.at(low, self.group, self.net_reward)
        return high - low > EPSILON

    @property
    def num_tokens(self) -> Ints:
        """[N] tokens that the policy wrote."""
        ends = np.concatenate([[0], np.cumsum(self.response_mask)])
        return ends[self.start[1:]] - ends[self.start[:-1]]

    def mean(self, values: npt.NDArray, rows: Mask | None = None) -> Doubles:
        """[G] the mean of [N] values over the rows of each group, or over some of them; NaN without any."""
        chosen = slice(None) if rows is None else rows
        group = self.group[chosen]
        sums = np.bincount(group, np.asarray(values)[chosen], self.groups)
        with np.errstate(invalid="ignore"):
            return sums / np.bincount(group, minlength=self.groups)

    def sums(self, values: npt.NDArray) -> Doubles:
        """Return the sums [N] of values [T] over the tokens of each row that the policy wrote."""
        total = np.bincount(self.by_token(np.arange(len(self))), values * self.response_mask, len(self))
        return total.astype(np.float64, copy=False)

    def by_token(self, values: npt.NDArray) -> npt.NDArray:
        """Return values [T] from values [N]: each token has that of its row."""
        return np.repeat(values, self.length)

    def at(self, row: int) -> slice:
        """Return the places of the tokens of a row."""
        return slice(int(self.start[row]), int(self.start[row + 1]))

    def row_values(self, row: int, values: npt.NDArray) -> npt.NDArray:
        """Return the values of [T] that belong to tokens of a row that the policy wrote."""
        at = self.at(row)
        return values[at][self.response_mask[at]]

    def answer(self, row: int) -> Rollout:
        """Return the tokens of a row as an engine gives them."""
        at = self.at(row)
        mask = self.response_mask[at]
        return Rollout(self.token[at], bool(self.finished[row]), response_mask=None if mask.all() else mask)

    def places(self, rows: Ints) -> Ints:
        """Return the places of the tokens of some rows, in the order of the rows."""
        length = self.length[rows]
        ends = np.cumsum(length)
        return np.repeat(self.start[:-1][rows] - ends + length, length) + np.arange(ends[-1] if len(ends) else 0)

    @cached_property
    def group_start(self) -> Ints:
        """[G + 1] where the rows of each group of a whole batch begin, and the end of the last one."""
        return np.searchsorted(self.group, np.arange(self.groups + 1))

    def rows_of(self, groups: Iterable[int]) -> Ints:
        """Return the rows of some groups of a whole batch, in the order of the groups."""
        parts = [np.arange(*self.group_start[group : group + 2]) for group in groups]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def take(self, rows: Ints | Mask) -> "StepBatch":
        """Return some rows, by number in any order or by a mask [N]; the groups stay as they are."""
        rows = np.flatnonzero(rows) if np.asarray(rows).dtype == bool else np.asarray(rows, np.int64)
        places = self.places(rows)
        part = StepBatch(self.question, self.group[rows], self.length[rows])
        part.fill(**dict(self._filled("group")))
        part.fill(**{name: values[rows] for name, values in self._filled("row")})
        part.fill(**{name: values[places] for name, values in self._filled("token")})
        return part

    def take_groups(self, groups: Sequence[int] | Ints) -> "StepBatch":
        """Return some groups of a whole batch with their rows, numbered anew in the given order."""
        numbers = np.asarray(groups, np.int64)
        if np.array_equal(numbers, np.arange(self.groups)):
            return self
        part = self.take(self.rows_of(numbers))
        rows = np.bincount(self.group, minlength=self.groups)[numbers]
        again = StepBatch(self.question[numbers], np.repeat(np.arange(len(numbers)), rows), part.length)
        again.fill(**{name: values[numbers] for name, values in self._filled("group")})
        again.fill(**{name: getattr(part, name) for name, _ in part._filled("row", "token")})
        return again

    def append_rows(self, other: "StepBatch") -> "StepBatch":
        """Append the rows of another batch to the same groups, and return the whole."""
        whole = self._and(other, self.question, other.group)
        whole = whole.take(np.argsort(whole.group, kind="stable"))
        whole.fill(**dict(self._filled("group")))
        return whole._with_counts(self)

    def append_groups(self, other: "StepBatch") -> "StepBatch":
        """Append the groups of another batch, and return the whole."""
        whole = self._and(other, np.concatenate([self.question, other.question]), other.group + self.groups)
        for name, values in self._filled("group"):
            if other.has(name):
                whole.fill(**{name: np.concatenate([values, getattr(other, name)])})
        return whole._with_counts(self, other)

    def _and(self, other: "StepBatch", question: Ints, group: Ints) -> "StepBatch":
        """Return the rows of both."""
        both = (self, other)
        whole = StepBatch(question, np.concatenate([self.group, group]), np.concatenate([self.length, other.length]))
        for name, column in columns_of("row", "token").items():
            if any(part.has(name) for part in both):
                whole.fill(**{name: column.joined([part.column(name) for part in both])})
        return whole

    def _with_counts(self, *parts: "StepBatch") -> "StepBatch":
        counts = [part.counts for part in parts if part.has("counts")]
        if counts:
            self.counts = counts[0] if len(counts) == 1 else counts[0] + counts[1]
        return self

    def column(self, name: str) -> Any:
        """Return a column, or its defaults where it is not filled."""
        return getattr(self, name) if self.has(name) else COLUMNS[name].filled(self._size(name))

    def _filled(self, *axes: Axis) -> Iterator[tuple[str, Any]]:
        return ((name, getattr(self, name)) for name in columns_of(*axes) if self.has(name))


def _flat(values: Sequence[npt.NDArray | None], length: Sequence[int], dtype: Any, nothing: Any) -> npt.NDArray:
    """Return the values of all rows, end to end; `nothing` for rows without any."""
    parts = [np.full(n, nothing, dtype) if of_row is None else of_row for of_row, n in zip(values, length, strict=True)]
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)
