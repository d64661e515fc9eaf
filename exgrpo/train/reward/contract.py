"""Contract of a reward function: the columns it takes, how it is called, and the outcome of the value it returns."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, TypeVar

from exgrpo.train.common.errors import SHOWN, DataError, ExgrpoError, RewardError, shown
from exgrpo.train.common.limits import LARGEST_REWARD, MOST_PARTS

GRACE_SECONDS = 5.0
"""Seconds beyond its time limit after which a call of asynchronous answers counts as hung."""

_BATCH = "exgrpo_batch"  # attribute that marks a batched reward

_RULE = f"a reward is a finite number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}, or a mapping of names to them"

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Columns:
    """Columns of a question's row that a reward or an environment takes, by the names of its keyword arguments.

    Attributes:
        needed: arguments without a default: every row must have these columns.
        optional: arguments with a default: filled from rows that have the column.
        rest: True if all other columns are passed too (`**row`).
        own: names of the positional arguments, which cannot be filled by name.
        taker: the function's kind and name, for error messages.
    """

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    rest: bool = False
    own: tuple[str, ...] = ()
    taker: str = ""

    def __contains__(self, name: str) -> bool:
        return name in self.needed or name in self.optional or (self.rest and name not in self.own)

    def __or__(self, other: "Columns") -> "Columns":
        """Return the columns that at least one of the two takes."""
        return Columns(
            needed=tuple(dict.fromkeys((*self.needed, *other.needed))),
            optional=tuple(dict.fromkeys((*self.optional, *other.optional))),
            rest=self.rest or other.rest,
            own=tuple(name for name in self.own if name in other.own),
            taker=" or the ".join(filter(None, (self.taker, other.taker))),
        )

    def of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of these columns in a row.

        Raises:
            DataError: the row lacks a needed column; the message begins with the verb.
        """
        for name in self.needed:
            if name not in row:
                raise DataError(
                    f"has no column {shown(name)}, which the {self.taker} takes; its columns are "
                    f"{shown(', '.join(row))}"
                )
        return {name: value for name, value in row.items() if name in self}

    def without(self, name: str) -> "Columns":
        """Return these columns without one of them."""
        needed, optional = (tuple(one for one in of if one != name) for of in (self.needed, self.optional))
        return replace(self, needed=needed, optional=optional)


ALL_COLUMNS = Columns(rest=True)
TURNS = "turns"
"""Name of the reward argument that receives the turns of an answer produced with an environment: texts of the policy
and of the environment alternately, the policy's first."""


@dataclass(frozen=True)
class Contract:
    """Calling convention of a reward; pickled between processes.

    Attributes:
        columns: columns of each question's row that are passed as keyword arguments.
        batch: largest number of answers per call, passed as lists; 0: one answer per call.
        asynchronous: True for a coroutine function, of which several calls are in flight at a time.
    """

    columns: Columns = Columns()
    batch: int = 0
    asynchronous: bool = False

    def together(self, concurrency: int) -> int:
        """Return the number of answers that a process grades at a time; `concurrency` bounds the calls in flight."""
        return concurrency if self.asynchronous else self.batch or 1

    def seconds(self, answers: int, limit: float) -> float:
        """Return the seconds after which a process grading `answers` answers is killed; `limit` is per answer."""
        return limit + GRACE_SECONDS if self.asynchronous else limit * answers


def batched(size: int) -> Callable[[F], F]:
    """Mark a reward that grades several answers in one call.

    It takes lists of at most `size` responses, gold answers and values per column, and returns as many rewards.

    Raises:
        ValueError: the size is below 1.
    """
    if size < 1:
        raise ValueError(f"a batch has at least 1 answer, not {size}")

    def mark(function: F) -> F:
        vars(function)[_BATCH] = size
        return function

    return mark


def contract_of(function: Callable[..., Any], name: str) -> Contract:
    """Return the contract of the reward called `name`.

    Raises:
        RewardError: the function cannot be called with (response, gold) and columns, or is batched and asynchronous.
    """
    batch = getattr(function, _BATCH, 0)
    call = type(function).__call__  # for callable objects
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    if batch and asynchronous:
        raise RewardError(f"reward {name!r} is asynchronous and batched: leave out one of the two")
    return Contract(columns_of(function, f"reward {name!r}", "(response, gold)", RewardError), batch, asynchronous)


def columns_of(function: Callable[..., Any], taker: str, first: str, error: type[ExgrpoError]) -> Columns:
    """Return the columns that a function takes after its two positional arguments.

    Args:
        function: the function whose signature is read.
        taker: its kind and name, for error messages.
        first: its first two arguments as text, such as "(response, gold)".
        error: class of the error if the signature does not fit.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return Columns()  # some compiled functions have no signature
    parameters = signature.parameters.values()
    named = [one for one in parameters if one.kind is one.KEYWORD_ONLY]
    needed = tuple(one.name for one in named if one.default is one.empty)
    try:
        signature.bind("", "", **dict.fromkeys(needed))
    except TypeError as problem:
        raise error(
            f"{taker} must take {first}, and columns of the row as keyword-only arguments, as in "
            f"{first[:-1]}, *, difficulty): {problem}"
        ) from problem
    return Columns(
        needed=needed,
        optional=tuple(one.name for one in named if one.default is not one.empty),
        rest=any(one.kind is one.VAR_KEYWORD for one in parameters),
        own=tuple(one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD),
        taker=taker,
    )


@dataclass(frozen=True)
class Outcome:
    """Result of grading one answer; pickled between processes.

    Attributes:
        reward: 0 unless the reward function returned a valid value.
        key: key of the solution, from `exgrpo.train.reward.worker.hashed`; 0: none.
        timed_out: True if the time limit was exceeded.
        error: exception of the reward or its key function with the line of the reward's file, or the process's death.
        misuse: what one of them returned, and what it must return instead.
        parts: unweighted parts of the reward by name; empty if it is one number.
    """

    reward: float = 0.0
    key: int = 0
    timed_out: bool = False
    error: str | None = None
    misuse: tuple[str, str] | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


def worth(value: Any, weights: Mapping[str, float]) -> Outcome:
    """Convert a returned value into an outcome: a number, or the sum of named parts times these weights (else 1)."""
    if not isinstance(value, Mapping):
        number = _number(value)
        return _misuse(with_type(value)) if number is None else Outcome(reward=number)
    parts: dict[str, float] = {}
    for name, part in value.items():
        number = _number(part)
        if number is None or not isinstance(name, str):
            return _misuse(f"{with_type(part)} as its part {shown(name)}")
        if len(name) > SHOWN:
            return _misuse(f"a part with a name of {len(name)} characters")
        parts[name] = number
        if len(parts) > MOST_PARTS:
            return _misuse(f"more than {MOST_PARTS} parts")
    if not parts:
        return _misuse("no parts")
    total = math.fsum(weights.get(name, 1.0) * part for name, part in parts.items())
    if _number(total) is None:
        return _misuse(f"parts with the weighted sum {total:g}")
    return Outcome(reward=total, parts=parts)


def with_type(value: Any) -> str:
    """Format a value with its type for an error message."""
    return f"{shown(value)} ({type(value).__name__})"


def _misuse(returned: str) -> Outcome:
    return Outcome(misuse=(returned, _RULE))


def _number(value: Any) -> float | None:
    try:
        # numpy.bool, as np.isclose returns it, is not a Real.
        number = float(value) if isinstance(value, Real) or str(getattr(value, "dtype", "")) == "bool" else None
    except Exception:  # 10**400 overflows; a user's number class may raise anything
        return None
    return number if number is not None and abs(number) <= LARGEST_REWARD else None  # also rejects NaN
