"""Grading process: load rewards and grade answers, one by one or several per call.

Its use of the machine is limited as far as the system (Linux) supports limits.
"""

import asyncio
import ctypes
import os
import pickle
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from exgrpo.train.common.errors import GraderError, cause
from exgrpo.train.reward.contract import Contract, Outcome, contract_of, with_type, worth
from exgrpo.train.reward.names import Key, Reward, is_own, resolve_key, resolve_reward

GIB = 2**30
FILE_BYTES = GIB
"""Largest file that a grading process may write."""
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # flags of unshare(2)

TOO_MUCH_KEPT = 86
"""Exit status of a process that keeps more memory between calls than one call may allocate."""
_ONE_EACH = "a batched reward returns a sequence with one reward for each answer"


class Task(NamedTuple):
    """An answer to grade; pickled between processes.

    Attributes:
        reward: name by which the reward was loaded.
        response: part of the model's response on which the grade depends.
        gold: the gold answer.
        columns: columns that the reward takes, pickled so that equal answers are detected; empty: none.
    """

    reward: str
    response: str
    gold: str
    columns: bytes = b""

    def arguments(self) -> dict[str, Any]:
        """Return the columns by name."""
        return pickle.loads(self.columns) if self.columns else {}


@dataclass(frozen=True)
class Bounds:
    """Limits of a grading process; pickled between processes.

    Attributes:
        time_limit: seconds per answer.
        memory: bytes that a call may allocate.
        network: True if the user's functions may use the network; those of the package never may.
    """

    time_limit: float
    memory: int
    network: bool


@dataclass(frozen=True)
class _Loaded:
    function: Reward
    key: Key | None
    contract: Contract
    file: str | None

    @classmethod
    def of(cls, name: str) -> "_Loaded":
        function = resolve_reward(name)
        place = name.rpartition(":")[0]
        file = place if place.endswith(".py") else getattr(sys.modules.get(place), "__file__", None)
        return cls(function, resolve_key(name), contract_of(function, name), file)


@dataclass
class _Worker:
    rewards: dict[str, _Loaded] = field(default_factory=dict)
    problem: Exception | None = None
    bounds: Bounds = Bounds(0.0, 0, network=True)
    offline: bool = False
    first_data: int = 0
    """Bytes in use after start-up."""
    weights: Mapping[str, float] = field(default_factory=dict)
    loop: asyncio.Runner = field(default_factory=asyncio.Runner)
    """Event loop shared by all calls, since connections of an asynchronous reward belong to its loop."""


_worker = _Worker()


def start_worker(rewards: Sequence[str], bounds: Bounds, weights: Mapping[str, float]) -> None:
    """Load the rewards; a failure is returned by `start_report`."""
    # A process that hangs in C runs no Python handler; the default action of a signal still ends it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _worker.bounds, _worker.weights = bounds, weights
    try:
        _confine(rewards, bounds)
        _worker.rewards = {name: _Loaded.of(name) for name in rewards}
    except Exception as error:
        _worker.problem = error
    for name, loaded in _worker.rewards.items():
        if not is_own(name):
            with suppress(Exception):  # warms up imports and parser caches; some rewards reject this gold
                loaded.function(r"</think>\boxed{\frac{1}{2}}", "0.5")
    _worker.first_data = data_bytes()


def _confine(rewards: Sequence[str], bounds: Bounds) -> None:
    limit_files()
    own = any(is_own(name) for name in rewards)
    if own and bounds.network:
        return
    problem = leave_network()
    _worker.offline = not problem
    if problem and own:
        raise GraderError(
            f"reward.network=false: this system lets no process leave the network ({problem}). Allow user namespaces, "
            "or leave the option out"
        )


def start_report() -> tuple[dict[str, Contract], bool] | Exception:
    """Return the contracts of the rewards and True if offline, or the exception if a reward cannot be used."""
    contracts = {name: loaded.contract for name, loaded in _worker.rewards.items()}
    return _worker.problem or (contracts, _worker.offline)


def grade(tasks: Sequence[Task], seconds: float) -> list[Outcome]:
    """Grade answers with one reward in a grading process, as many as it takes together.

    Whatever the reward does, this returns or the process dies: it is killed after `seconds`. It also exits if it keeps
    more memory than a call may allocate, so that leaks do not add up.
    """
    loaded = _worker.rewards[tasks[0].reward]
    # Ends a hung process whose pool is gone because the process that owns the pool was killed.
    signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 10)
    try:
        with little_memory(_worker.bounds.memory):
            outcomes = _graded(loaded, tasks)
    except BaseException as error:  # SystemExit too: it must not end the process
        outcomes = [_failed(error, loaded)] * len(tasks)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if data_bytes() - _worker.first_data > _worker.bounds.memory:
        os._exit(TOO_MUCH_KEPT)
    return outcomes


def _graded(loaded: _Loaded, tasks: Sequence[Task]) -> list[Outcome]:
    if loaded.contract.asynchronous:
        return _worker.loop.run(_in_flight(loaded, tasks))
    if loaded.contract.batch:
        return _batch(loaded, tasks)
    return [_outcome(loaded, task, loaded.function(task.response, task.gold, **task.arguments())) for task in tasks]


def _batch(loaded: _Loaded, tasks: Sequence[Task]) -> list[Outcome]:
    rows = [task.arguments() for task in tasks]
    # A column that only some rows have is optional, and left out of a call in which a row lacks it.
    columns = {name: [row[name] for row in rows] for name in rows[0] if all(name in row for row in rows)}
    values: Any = loaded.function([task.response for task in tasks], [task.gold for task in tasks], **columns)
    try:
        values = list(values)
    except TypeError:
        return [Outcome(misuse=(with_type(values), _ONE_EACH))] * len(tasks)
    if len(values) != len(tasks):
        return [Outcome(misuse=(f"{len(values)} rewards for {len(tasks)} answers", _ONE_EACH))] * len(tasks)
    return [_outcome(loaded, task, value) for task, value in zip(tasks, values, strict=True)]


async def _in_flight(loaded: _Loaded, tasks: Sequence[Task]) -> list[Outcome]:
    return await asyncio.gather(*(_awaited(loaded, task) for task in tasks))


async def _awaited(loaded: _Loaded, task: Task) -> Outcome:
    timer = asyncio.timeout(_worker.bounds.time_limit)
    try:
        async with timer:
            value = await loaded.function(task.response, task.gold, **task.arguments())
        return _outcome(loaded, task, value)
    except BaseException as error:
        return Outcome(timed_out=True) if timer.expired() else _failed(error, loaded)


def _failed(error: BaseException, loaded: _Loaded) -> Outcome:
    if isinstance(error, MemoryError):
        return Outcome(error=f"it needs more memory than the {_worker.bounds.memory / GIB:g} GiB of reward.memory_gib")
    return Outcome(error=cause(error, loaded.file))


def _outcome(loaded: _Loaded, task: Task, value: Any) -> Outcome:
    try:
        outcome = worth(value, _worker.weights)
        if outcome.misuse is not None:
            return outcome
        form: Any = task.response if loaded.key is None else loaded.key(task.response, task.gold)
        if not isinstance(form, str):
            return Outcome(misuse=(f"the key {with_type(form)}", "a key is a text"))
        return replace(outcome, key=hashed(form.strip()))
    except BaseException as error:
        return _failed(error, loaded)


def hashed(form: str) -> int:
    """Return the key of a canonical form: 63 bits of its hash, the same in every process; 0 only for an empty text."""
    if not form:
        return 0
    digest = blake2b(form.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1 or 1


def limit_files() -> None:
    """Limit the files of this process to `FILE_BYTES` and turn core dumps off."""
    for kind, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, FILE_BYTES)):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def leave_network() -> str:
    """Cut this process, which must be single-threaded, off from the network; returns the reason on failure, else "".

    The process gets a network namespace without devices, and a user namespace that keeps its user id: in such a one
    unprivileged users may create network namespaces.
    """
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare"):
        return "the system has no namespaces"
    if libc.unshare(_NEW_USER | _NEW_NETWORK):
        return os.strerror(ctypes.get_errno())
    with suppress(OSError):  # on failure the user id is that of nobody, with the same rights
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    return ""


def data_bytes() -> int:
    """Return the private writable memory of this process in bytes, as RLIMIT_DATA counts it."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


@contextmanager
def little_memory(most: int) -> Iterator[None]:
    r"""Limit this process to `most` more bytes: \boxed{9^{9^{9^9}}} would take all memory within the time limit.

    RLIMIT_DATA counts private writable memory. RLIMIT_AS also counts address space that is only reserved or mapped from
    files, of which a reward that uses torch or CUDA has many GiB.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bounds = [bound for bound in (before, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([data_bytes() + most, *bounds]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))
