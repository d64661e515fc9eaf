"""How a reward function is called: what its signature and its marks say."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from exgrpo.train.errors import DataError, RewardError, shown

GRACE_SECONDS = 5.0
"""A call of asynchronous answers that lasts so much longer than its time limit hangs."""

_BATCH = "exgrpo_batch"
"""Name of the attribute that marks a batched reward."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Columns:
    """The columns of a question's row that a reward takes, by the names of its keyword arguments.

    Attributes:
        needed: arguments without a default: every row must have these columns.
        optional: arguments with a default: the column is taken from rows that have it.
        rest: whether all other columns are taken, too (`**row`).
        own: names of the first arguments, which cannot be given by name.
        reward: its name, for messages.
    """

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    rest: bool = False
    own: tuple[str, ...] = ()
    reward: str = ""

    def __contains__(self, name: str) -> bool:
        return name in self.needed or name in self.optional or (self.rest and name not in self.own)

    def of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a row.

        Raises:
            DataError: the row lacks one; the message begins with the verb.
        """
        for name in self.needed:
            if name not in row:
                raise DataError(
                    f"has no column {shown(name)}, which the reward {self.reward!r} takes; its columns are "
                    f"{shown(', '.join(row))}"
                )
        return {name: value for name, value in row.items() if name in self}


ALL_COLUMNS = Columns(rest=True)


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
    return Contract(_columns(function, name), batch, asynchronous)


def _columns(function: Callable[..., Any], name: str) -> Columns:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return Columns()  # some compiled functions do not tell
    parameters = signature.parameters.values()
    named = [one for one in parameters if one.kind is one.KEYWORD_ONLY]
    needed = tuple(one.name for one in named if one.default is one.empty)
    try:
        signature.bind("", "", **dict.fromkeys(needed))
    except TypeError as error:
        raise RewardError(
            f"reward {name!r} must take (response, gold), and columns of the row as keyword arguments behind a *, as "
            f"(response, gold, *, difficulty): {error}"
        ) from error
    return Columns(
        needed=needed,
        optional=tuple(one.name for one in named if one.default is not one.empty),
        rest=any(one.kind is one.VAR_KEYWORD for one in parameters),
        own=tuple(one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD),
        reward=name,
    )
