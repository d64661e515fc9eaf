"""What a reward returned is worth, or what is wrong with it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
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
        error: what the reward or its key function raised, or how its process died.
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
        number = float(value) if isinstance(value, Real) else None
    except Exception:  # as of 10**400; a class of numbers of its own may raise anything
        return None
    return number if number is not None and abs(number) <= LARGEST_REWARD else None  # a NaN is not
