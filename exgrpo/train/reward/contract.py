"""How a reward function is called, as its signature and its marks say, and what comes of what it returns."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, TypeVar

from exgrpo.train.common.errors import SHOWN, DataError, ExgrpoError, RewardError, shown
from exgrpo.train.common.limits import LARGEST_REWARD, MOST_PARTS

GRACE_SECONDS = 5.0
"""A call of asynchronous answers that lasts so much longer than its time limit hangs."""

_BATCH = "exgrpo_batch"
"""Name of the attribute that marks a batched reward."""

_RULE = f"a reward is a finite number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}, or a mapping of names to them"

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Columns:
    """The columns of a question's row that a reward or an environment takes, by the names of its keyword arguments.

    Attributes:
        needed: arguments without a default: every row must have these columns.
        optional: arguments with a default: the column is taken from rows that have it.
        rest: whether all other columns are taken, too (`**row`).
        own: names of the first arguments, which cannot be given by name.
        taker: who takes them, for messages.
    """

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    rest: bool = False
    own: tuple[str, ...] = ()
    taker: str = ""

    def __contains__(self, name: str) -> bool:
        return name in self.needed or name in self.optional or (self.rest and name not in self.own)

    def __or__(self, other: "Columns") -> "Columns":
        """Those that one of two takes."""
        return Columns(
            needed=tuple(dict.fromkeys((*self.needed, *other.needed))),
            optional=tuple(dict.fromkeys((*self.optional, *other.optional))),
            rest=self.rest or other.rest,
            own=tuple(name for name in self.own if name in other.own),
            taker=" or the ".join(filter(None, (self.taker, other.taker))),
        )

    def of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a row.

        Raises:
            DataError: the row lacks one; the message begins with the verb.
        """
        for name in self.needed:
            if name not in row:
                raise DataError(
                    f"has no column {shown(name)}, which the {self.taker} takes; its columns are "
                    f"{shown(', '.join(row))}"
                )
        return {name: value for name, value in row.items() if name in self}

    def without(self, name: str) -> "Columns":
        """These, but one."""
        needed, optional = (tuple(one for one in of if one != name) for of in (self.needed, self.optional))
        return replace(self, needed=needed, optional=optional)


ALL_COLUMNS = Columns(rest=True)
TURNS = "turns"
"""A reward with an argument of this name gets the turns of an answer that an environment took part in: texts of the
policy and of the environment in turn, the first of the policy."""


@dataclass(frozen=True)
class Contract:
    """What a reward wants in a call; crosses process borders.

    Attributes:
        columns: of the row of each question.
        batch: a call gets lists of at most so many answers; 0: it gets one answer.
        asynchronous: whether it is a coroutine function, of which several calls are in flight at a time.
    """

    columns: Columns = Columns()
    batch: int = 0
    asynchronous: bool = False

    def together(self, concurrency: int) -> int:
        """How many answers a grading process takes at a time, where `concurrency` calls may be in flight."""
        return concurrency if self.asynchronous else self.batch or 1

    def seconds(self, answers: int, limit: float) -> float:
        """After how many seconds a process that grades so many answers is killed, by the limit of one answer."""
        return limit + GRACE_SECONDS if self.asynchronous else limit * answers


def batched(size: int) -> Callable[[F], F]:
    """Mark a reward that grades several answers in a call.

    It gets lists of at most `size` responses, gold answers and values of each column, and returns as many rewards.

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
    """The contract of the reward called `name`.

    Raises:
        RewardError: the function cannot be called with (response, gold) and columns, or is batched and asynchronous.
    """
    batch = getattr(function, _BATCH, 0)
    call = type(function).__call__  # of an object
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    if batch and asynchronous:
        raise RewardError(f"reward {name!r} is asynchronous and batched: leave out one of the two")
    return Contract(columns_of(function, f"reward {name!r}", "(response, gold)", RewardError), batch, asynchronous)


def columns_of(function: Callable[..., Any], taker: str, first: str, error: type[ExgrpoError]) -> Columns:
    """The columns that a function takes behind two arguments.

    Args:
        function: by its signature.
        taker: what it is and its name, for messages.
        first: its first two arguments, "(response, gold)" or the like.
        error: raised where it cannot be called so.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return Columns()  # some compiled functions do not tell
    parameters = signature.parameters.values()
    named = [one for one in parameters if one.kind is one.KEYWORD_ONLY]
    needed = tuple(one.name for one in named if one.default is one.empty)
    try:
        signature.bind("", "", **dict.fromkeys(needed))
    except TypeError as problem:
        raise error(
            f"{taker} must take {first}, and columns of the row as keyword arguments behind a *, as "
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
    """What became of one answer; crosses process borders.

    Attributes:
        reward: what it is worth; 0 unless the reward returned a number.
        key: of its solution, see `exgrpo.train.reward.worker.hashed`; 0: it has none.
        timed_out: whether it hit the time limit.
        error: what the reward or its key function raised, with its line of the reward's file, or how its process died.
        misuse: what one of them returned, and what it has to return instead.
        parts: of the reward, by name and without their weights; empty where it is one number.
    """

    reward: float = 0.0
    key: int = 0
    timed_out: bool = False
    error: str | None = None
    misuse: tuple[str, str] | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


def worth(value: Any, weights: Mapping[str, float]) -> Outcome:
    """The reward that a returned value is: a number, or named parts with these weights (else 1), which are summed."""
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
    """A value for a message."""
    return f"{shown(value)} ({type(value).__name__})"


def _misuse(returned: str) -> Outcome:
    return Outcome(misuse=(returned, _RULE))


def _number(value: Any) -> float | None:
    try:
        # NumPy's bool, as np.isclose gives it, is no Real.
        number = float(value) if isinstance(value, Real) or str(getattr(value, "dtype", "")) == "bool" else None
    except Exception:  # as of 10**400; a class of numbers of its own may raise anything
        return None
    return number if number is not None and abs(number) <= LARGEST_REWARD else None  # a NaN is not
