"""Rewards by name, and a pool of processes that grades answers under a hard time limit.

A reward is a deterministic function (response, gold) -> finite number. Names: "math" and "math_no_think" (see
exgrpo.train.reward.grading), or a Python path: "package.module:function" for what can be imported,
"path/to/file.py:function" for a file.

A reward may have a form function beside it, of the same signature: 1.0 for a response that has the form in which the
reward looks for an answer, whether it is right or wrong, else 0.0. It is named like the reward with "_form" behind
("math_form" for "math", "my_rewards.py:score_form" for "my_rewards.py:score"), and `form_of` finds it.
"""

import difflib
import importlib
import importlib.util
import inspect
import math
import multiprocessing
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from pebble import ProcessExpired, ProcessPool

from exgrpo.train.errors import GraderError, MissingRewardError, RewardError, os_errors_as
from exgrpo.train.reward import grading

Reward = Callable[[str, str], float]
_Task = tuple[str, str]  # the part of a response that decides, and the gold answer

BUILTIN: dict[str, Reward] = {"math": grading.math, "math_no_think": grading.math_no_think}

START_SECONDS = 300.0
BUILTIN_MEMORY_BYTES = 2 << 30
_FRUITLESS_ROUNDS = 3


@dataclass(frozen=True)
class Grades:
    """What grading a list of N answers gave."""

    reward: tuple[float, ...]
    """[N], in the order of the answers; 0.0 for those that timed out or failed."""
    timed_out: int
    """How many of the N answers hit the time limit."""
    failed: int
    """How many of the N answers made the reward raise, or its process die."""


def resolve_reward(name: str) -> Reward:
    """The reward function called `name`.

    Raises RewardError for an unknown name (naming near ones), a module or file that cannot be imported, a missing
    attribute, or one that is not callable with (response, gold); MissingRewardError for a missing file.
    """
    if name in BUILTIN:
        return BUILTIN[name]
    module, attribute = _locate(name)
    function = getattr(module, attribute, None)
    if function is None:
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RewardError(f"reward {name!r}: there is no {attribute!r} in it{hint}")
    _check_signature(function, name)
    return function


def form_of(name: str) -> str | None:
    """The name of the form function of the reward called `name`, None when it has none.

    Raises RewardError for a module or file that cannot be loaded, as `resolve_reward` does.
    """
    path = f"{grading.__name__}:{name}" if name in BUILTIN else name
    module, attribute = _locate(path)
    return f"{path}_form" if callable(getattr(module, f"{attribute}_form", None)) else None


def _locate(name: str) -> tuple[ModuleType, str]:
    """The module or file of a Python path, loaded, and the attribute."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        near = difflib.get_close_matches(name, BUILTIN, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RewardError(
            f"unknown reward {name!r}{hint} Known: {', '.join(BUILTIN)}, 'package.module:function' and "
            "'path/to/file.py:function'"
        )
    return (_load_file if place.endswith(".py") else _load_module)(place, name), attribute


def _load_module(place: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise RewardError(
            f"reward {name!r}: cannot import {place}: {type(error).__name__}: {error}. A module must be installed or "
            "on PYTHONPATH; a file can be named by its path, path/to/file.py:function"
        ) from error


def _load_file(place: str, name: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    with os_errors_as(RewardError, f"reward {name!r}: {path} cannot be read"):
        is_file = path.is_file()
    if not is_file:
        raise MissingRewardError(f"reward {name!r}: there is no file {path}")
    module_name = f"exgrpo_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RewardError(f"reward {name!r}: cannot run {path}: {type(error).__name__}: {error}") from error
    return module


def _check_signature(function: Any, name: str) -> None:
    if not callable(function):
        raise RewardError(f"reward {name!r} is not callable: it is a {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some compiled functions do not tell
    try:
        signature.bind("", "")
    except TypeError as error:
        raise RewardError(f"reward {name!r} must take (response, gold): {error}") from error


class Grader:
    """Grades answers with one reward in `workers` processes; use it as a context manager or call close().

    Every answer gets `time_limit` seconds of its own, start-up excluded. An answer that exceeds them (its process is
    killed, whatever it is doing) or whose process dies is worth 0 and counted; the others are unaffected and the
    process is replaced. Equal answers in one call are graded once. Processes are forked from a small server, never
    from this (possibly multi-threaded) process, and import the reward only.

    Raises RewardError for a reward that cannot be resolved and GraderError when the processes do not start, both at
    construction.
    """

    def __init__(self, reward: str, *, workers: int, time_limit: float) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        if not (math.isfinite(time_limit) and time_limit > 0):
            raise ValueError(f"time_limit must be a positive number of seconds, got {time_limit}")
        self._reward = _absolute(reward)
        self._workers = workers
        self._time_limit = time_limit
        self._warned = False
        self._closed = False
        self._pool = self._start()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the processes; unfinished grading is abandoned. May be called again."""
        self._closed = True
        self._stop()

    def grade(self, answers: Sequence[tuple[str, str]]) -> Grades:
        """Grades (response, gold) pairs; blocks until all are graded. Raises as `begin` and `Grading.finish` do."""
        grading = self.begin()
        for response, gold in answers:
            grading.add(response, gold)
        return grading.finish()

    def begin(self) -> "Grading":
        """Begin to grade answers that come one by one. Raises ValueError after close()."""
        if self._closed:
            raise ValueError("the grader is closed")
        return Grading(self, self._reward)

    def schedule(self, task: "_Task") -> "_Scheduled":
        """Have a task graded in the background. Raises RuntimeError when the pool is broken."""
        pool = self._pool
        return _Scheduled(pool, pool.schedule(_grade, args=task, timeout=self._time_limit))

    def grade_round(self, tasks: list["_Task"], scheduled: dict["_Task", "_Scheduled"]) -> dict["_Task", "_Outcome"]:
        """Grades as many of `tasks` as the pool survives; after a break the pool is a new one.

        Those in `scheduled` are graded already or about to be; they are taken out of it.
        """
        outcomes = {}
        running = []
        broken = False
        try:
            for task in tasks:
                running.append(scheduled.pop(task) if task in scheduled else self.schedule(task))
        except RuntimeError:  # broken since, or between two calls: idle processes may be killed too
            broken = True
        for task, of_task in zip(tasks, running, strict=False):
            outcome = of_task.outcome()
            if outcome is not None:
                outcomes[task] = outcome
            elif of_task.pool is self._pool:
                broken = True
        if broken:
            self._stop()
            self._pool = self._start()
        return outcomes

    def _stop(self) -> None:
        self._pool.stop()
        self._pool.join()

    def report(self, outcomes: Sequence["_Outcome"]) -> None:
        """Raises TypeError for what is no reward, and warns of the first failure."""
        for outcome in outcomes:
            if outcome.misuse is not None:
                raise TypeError(f"reward {self._reward!r} returned {outcome.misuse}; it must return a finite number")
            if outcome.error is not None and not self._warned:
                self._warned = True
                warnings.warn(
                    f"reward {self._reward!r} failed on an answer, which is therefore worth 0 (further failures are "
                    f"only counted): {outcome.error}",
                    stacklevel=4,
                )

    def _start(self) -> ProcessPool:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["exgrpo.train.reward.pool", "math_verify"])
        pool = ProcessPool(
            max_workers=self._workers,
            initializer=_start_worker,
            initargs=(self._reward, self._time_limit),
            context=context,
        )
        try:
            problem = pool.schedule(_start_problem).result(timeout=START_SECONDS)
        except FutureTimeoutError:
            problem = GraderError(f"the grading processes did not start within {START_SECONDS:.0f} s")
        except (BrokenProcessPool, ProcessExpired) as error:
            problem = GraderError(f"a grading process died while it loaded reward {self._reward!r}: {error}")
        if problem is not None:
            pool.stop()
            pool.join()
            raise problem
        return pool


class Grading:
    """Answers that are graded while more of them come; see `Grader.begin`.

    `add` may be called in a thread of its own; `finish`, which replaces broken processes, belongs into the one that
    uses the grader otherwise.
    """

    def __init__(self, grader: Grader, reward: str) -> None:
        self._grader = grader
        self._reward = reward
        self._tasks: list[_Task | None] = []
        self._scheduled: dict[_Task, _Scheduled] = {}

    def add(self, response: str, gold: str) -> None:
        """Begin to grade one more answer."""
        part = _decisive_part(self._reward, response)
        task = None if part is None else (part, gold)
        self._tasks.append(task)
        if task is not None and task not in self._scheduled:
            with suppress(RuntimeError):  # a broken pool is replaced in the end
                self._scheduled[task] = self._grader.schedule(task)

    def finish(self) -> Grades:
        """What all answers are worth, in the order of `add`; blocks until all are graded.

        Raises TypeError when a reward returns something other than a finite number. The first exception that a
        reward raises is shown as a warning; it and all others count as failed.
        """
        pending = list(dict.fromkeys(task for task in self._tasks if task is not None))
        done: dict[_Task, _Outcome] = {}
        fruitless = 0
        while pending:
            outcomes = self._grader.grade_round(pending, self._scheduled)
            fruitless = 0 if outcomes else fruitless + 1
            if fruitless == _FRUITLESS_ROUNDS:
                # The pool breaks before any answer is graded: give up on the one it meets first, so that this ends.
                outcomes[pending[0]] = _Outcome(error="the grading processes died at once")
            done.update(outcomes)
            pending = [task for task in pending if task not in done]
        results = [_Outcome() if task is None else done[task] for task in self._tasks]
        self._grader.report(results)
        return Grades(
            reward=tuple(outcome.reward for outcome in results),
            timed_out=sum(outcome.timed_out for outcome in results),
            failed=sum(outcome.error is not None for outcome in results),
        )


@dataclass(frozen=True)
class _Scheduled:
    """An answer that a pool grades in the background."""

    pool: ProcessPool
    future: Future

    def outcome(self) -> "_Outcome | None":
        """Waits for it; None when the pool broke before it was graded."""
        while not self.future.done() and self.pool.active:  # a pool that breaks may leave futures undone
            wait([self.future], timeout=1.0)
        try:
            return self.future.result(timeout=0)
        except FutureTimeoutError:
            return _Outcome(timed_out=True) if self.future.done() else None
        except ProcessExpired as error:
            return _Outcome(error=f"the grading process died (exit code {error.exitcode})")
        except (BrokenProcessPool, CancelledError):
            return None


@dataclass(frozen=True)
class _Outcome:
    """What became of one answer; crosses process borders."""

    reward: float = 0.0
    timed_out: bool = False
    error: str | None = None
    misuse: str | None = None


def _absolute(reward: str) -> str:
    """`reward` with a file's path made absolute: the processes may have another working directory."""
    place, _, attribute = reward.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{attribute}" if place.endswith(".py") else reward


def _decisive_part(reward: str, response: str) -> str | None:
    """The part of `response` that `reward` depends on (None: worth 0), so that more answers are equal, and short."""
    if reward == "math":
        part = grading.answer_after_thinking(response)
        return None if part is None else f"{grading.END_OF_THINKING}{part}"
    return grading.final_answer(response) or None if reward == "math_no_think" else response


@dataclass
class _Worker:
    """State of a grading process."""

    function: Reward | None = None
    problem: Exception | None = None
    alarm: float = 0.0


_worker = _Worker()


def _start_worker(reward: str, time_limit: float) -> None:
    # A process that hangs in C runs no Python handler: with the default action a signal ends it all the same.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # Ends a hung process that nobody watches any more, because the process that owns the pool was killed.
    _worker.alarm = 2 * time_limit + 10
    try:
        _worker.function = resolve_reward(reward)
        if reward in BUILTIN:
            _limit_memory()
            _worker.function(r"</think>\boxed{\frac{1}{2}}", "0.5")  # imports and fills the parser's caches
    except Exception as error:
        _worker.problem = error


def _limit_memory() -> None:
    r"""An answer such as \boxed{9^{9^{9^9}}} would take all memory within the time limit."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + BUILTIN_MEMORY_BYTES, hard))


def _start_problem() -> Exception | None:
    return _worker.problem


def _grade(response: str, gold: str) -> _Outcome:
    """Grades one answer in a grading process; whatever the reward does, this returns (or the process dies)."""
    assert _worker.function is not None
    signal.setitimer(signal.ITIMER_REAL, _worker.alarm)
    try:
        value: Any = _worker.function(response, gold)
    except BaseException as error:  # SystemExit too: it must not end the process
        return _Outcome(error=f"{type(error).__name__}: {error}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if not isinstance(value, Real) or not math.isfinite(value):
        return _Outcome(misuse=f"{value!r:.80} ({type(value).__name__})")
    return _Outcome(reward=float(value))
