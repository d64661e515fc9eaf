"""What a reward returned is worth, or what is wrong with it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from exgrpo.train.errors import SHOWN, shown
from exgrpo.train.limits import LARGEST_REWARD, MOST_PARTS

_RULE = f"a reward is a finite number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}, or a mapping of names to them"


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


@dataclass(frozen=True)
class Failure:
    """Answers that a reward could not grade, for causes of one kind; crosses process borders.

    Attributes:
        reward: its name.
        cause: what became of the first one.
        question: of the first one.
        gold: the right answer to it.
        response: the first one.
        count: how many they are.
    """

    reward: str
    cause: str
    question: str
    gold: str
    response: str
    count: int = 1

    @property
    def kind(self) -> tuple[str, str]:
        """The reward, and the type of its exception or another cause."""
        return self.reward, self.cause.partition(":")[0]

    def __str__(self) -> str:
        return (
            f"reward {self.reward!r} failed on an answer to {shown(self.question)}, which is therefore worth 0: "
            f"{self.cause}. Further failures of this kind are only counted"
        )


def by_kind(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Those of each kind together, in the order of the first ones."""
    kinds: dict[tuple[str, str], Failure] = {}
    for one in failures:
        first = kinds.get(one.kind)
        kinds[one.kind] = replace(first, count=first.count + one.count) if first else one
    return tuple(kinds.values())


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
        number = float(value) if isinstance(value, Real) else None
    except Exception:  # as of 10**400; a class of numbers of its own may raise anything
        return None
    return number if number is not None and abs(number) <= LARGEST_REWARD else None  # a NaN is not
