"""A grading process: it loads one reward and grades one answer after the other."""

import resource
import signal
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from exgrpo.train.errors import shown
from exgrpo.train.limits import LARGEST_REWARD
from exgrpo.train.reward.names import Reward, resolve_reward

BUILTIN_MEMORY_BYTES = 2 << 30


@dataclass(frozen=True)
class Outcome:
    """What became of one answer; crosses process borders.

    Attributes:
        reward: what it is worth; 0 unless the reward returned a number.
        timed_out: whether it hit the time limit.
        error: what the reward raised, or how its process died.
        misuse: what the reward returned, and that is no reward.
    """

    reward: float = 0.0
    timed_out: bool = False
    error: str | None = None
    misuse: str | None = None


@dataclass
class _Worker:
    """State of a grading process."""

    function: Reward | None = None
    problem: Exception | None = None
    alarm: float = 0.0


_worker = _Worker()


def start_worker(reward: str, time_limit: float) -> None:
    """Load the reward; where that fails, `start_problem` says why."""
    # A process that hangs in C runs no Python handler: with the default action a signal ends it all the same.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # Ends a hung process that nobody watches any more, because the process that owns the pool was killed.
    _worker.alarm = 2 * time_limit + 10
    try:
        _worker.function = resolve_reward(reward)
        if (getattr(_worker.function, "__module__", None) or "").startswith("exgrpo."):
            _limit_memory()
            _worker.function(r"</think>\boxed{\frac{1}{2}}", "0.5")  # imports and fills the parser's caches
    except Exception as error:
        _worker.problem = error


def _limit_memory() -> None:
    r"""An answer such as \boxed{9^{9^{9^9}}} would take all memory within the time limit."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + BUILTIN_MEMORY_BYTES, hard))


def start_problem() -> Exception | None:
    """Why the reward cannot be used; None where it can."""
    return _worker.problem


def grade(response: str, gold: str) -> Outcome:
    """Grades one answer in a grading process; whatever the reward does, this returns (or the process dies)."""
    assert _worker.function is not None
    signal.setitimer(signal.ITIMER_REAL, _worker.alarm)
    try:
        value: Any = _worker.function(response, gold)
    except BaseException as error:  # SystemExit too: it must not end the process
        return Outcome(error=f"{type(error).__name__}: {shown(error)}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    reward = _number(value)
    if reward is None:
        return Outcome(misuse=f"{shown(value)} ({type(value).__name__})")
    return Outcome(reward=reward)


def _number(value: Any) -> float | None:
    try:
        number = float(value) if isinstance(value, Real) else None
    except Exception:  # as of 10**400; a class of numbers of its own may raise anything
        return None
    return number if number is not None and abs(number) <= LARGEST_REWARD else None  # a NaN is not
