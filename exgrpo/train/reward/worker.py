"""A grading process: it loads rewards and grades one answer after the other."""

import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from numbers import Real
from pathlib import Path
from typing import Any

from exgrpo.train.errors import shown
from exgrpo.train.limits import LARGEST_REWARD
from exgrpo.train.reward.names import Key, Reward, resolve_key, resolve_reward

BUILTIN_MEMORY_BYTES = 2 << 30


@dataclass(frozen=True)
class Outcome:
    """What became of one answer; crosses process borders.

    Attributes:
        reward: what it is worth; 0 unless the reward returned a number.
        key: of its solution, see `hashed`; 0: it has none.
        timed_out: whether it hit the time limit.
        error: what the reward or its key function raised, or how its process died.
        misuse: what one of them returned, and what it has to return instead.
    """

    reward: float = 0.0
    key: int = 0
    timed_out: bool = False
    error: str | None = None
    misuse: tuple[str, str] | None = None


@dataclass(frozen=True)
class _Loaded:
    """A reward in this process, with its key function."""

    function: Reward
    key: Key | None

    @property
    def ours(self) -> bool:
        """Whether it ships with the package."""
        return (getattr(self.function, "__module__", None) or "").startswith("exgrpo.")


@dataclass
class _Worker:
    """State of a grading process."""

    rewards: dict[str, _Loaded] = field(default_factory=dict)
    problem: Exception | None = None
    alarm: float = 0.0


_worker = _Worker()


def start_worker(rewards: Sequence[str], time_limit: float) -> None:
    """Load the rewards; where that fails, `start_problem` says why."""
    # A process that hangs in C runs no Python handler: with the default action a signal ends it all the same.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # Ends a hung process that nobody watches any more, because the process that owns the pool was killed.
    _worker.alarm = 2 * time_limit + 10
    try:
        _worker.rewards = {name: _Loaded(resolve_reward(name), resolve_key(name)) for name in rewards}
    except Exception as error:
        _worker.problem = error
    for loaded in _worker.rewards.values():
        if loaded.ours:
            with suppress(Exception):  # imports and fills the caches of a parser; not every reward reads such a gold
                loaded.function(r"</think>\boxed{\frac{1}{2}}", "0.5")


@contextmanager
def _little_memory() -> Iterator[None]:
    r"""An answer such as \boxed{9^{9^{9^9}}} would take all memory within the time limit."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + BUILTIN_MEMORY_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def start_problem() -> Exception | None:
    """Why a reward cannot be used; None where all can."""
    return _worker.problem


def grade(reward: str, response: str, gold: str) -> Outcome:
    """Grades one answer in a grading process; whatever the reward does, this returns (or the process dies)."""
    loaded = _worker.rewards[reward]
    signal.setitimer(signal.ITIMER_REAL, _worker.alarm)
    try:
        if loaded.ours:
            with _little_memory():
                return _graded(loaded, response, gold)
        return _graded(loaded, response, gold)
    except BaseException as error:  # SystemExit too: it must not end the process
        return Outcome(error=f"{type(error).__name__}: {shown(error)}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _graded(loaded: _Loaded, response: str, gold: str) -> Outcome:
    value: Any = loaded.function(response, gold)
    reward = _number(value)
    if reward is None:
        rule = f"a reward is a finite number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
        return Outcome(misuse=(f"{shown(value)} ({type(value).__name__})", rule))
    form: Any = response if loaded.key is None else loaded.key(response, gold)
    if not isinstance(form, str):
        return Outcome(misuse=(f"the key {shown(form)} ({type(form).__name__})", "a key is a text"))
    return Outcome(reward=reward, key=hashed(form.strip()))


def hashed(form: str) -> int:
    """The key of a canonical form: 63 bits of its hash, the same in every process; 0 of an empty one alone."""
    if not form:
        return 0
    digest = blake2b(form.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1 or 1


def _number(value: Any) -> float | None:
    try:
        number = float(value) if isinstance(value, Real) else None
    except Exception:  # as of 10**400; a class of numbers of its own may raise anything
        return None
    return number if number is not None and abs(number) <= LARGEST_REWARD else None  # a NaN is not
