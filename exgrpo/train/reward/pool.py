"""Pool of processes that grade answers under a hard time limit."""

import math
import multiprocessing
import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

from pebble import ProcessExpired, ProcessPool
from pebble.pool import process as of_pebble

from exgrpo.train.common.errors import SHOWN, DataError, GraderError, RewardError, shown
from exgrpo.train.common.records import Failure, by_kind
from exgrpo.train.reward.contract import Columns, Contract, Outcome
from exgrpo.train.reward.names import AUTO, absolute, decisive_part_of, is_own
from exgrpo.train.reward.worker import GIB, TOO_MUCH_KEPT, Bounds, Task, grade, start_report, start_worker

_Call = tuple[Task, ...]  # answers that a process grades together; one for most rewards

# pebble measures time limits with the wall clock: if it were set forward, all answers in flight would time out and be
# worth 0.
of_pebble.time = SimpleNamespace(time=time.monotonic, sleep=time.sleep)

START_SECONDS = 300.0
_OPTIONS = ("workers", "time_limit", "concurrency", "parts", "memory_gib", "network", "form")  # of `RewardConfig`
_MOST_BREAKS = 3  # broken pools before an answer counts as failed


@dataclass(frozen=True)
class Grades:
    """Result of grading a list of N answers."""

    reward: tuple[float, ...]
    """[N], in the order of the answers; 0.0 for those that timed out or failed."""
    timed_out: int
    """Number of answers that exceeded the time limit."""
    failed: int
    """Number of answers for which the reward raised or its process died."""
    key: tuple[int, ...]
    """[N] 63-bit hashes of the solutions: equal for answers to a question that differ only in form. 0: no key, or the
    answer timed out or failed."""
    parts: tuple[Mapping[str, float], ...] = ()
    """[N] unweighted parts of each reward by name; empty if no reward has parts."""
    failures: tuple[Failure, ...] = ()
    """Answers that timed out or failed, by kind."""


class Grader:
    """Grade answers with one or several rewards in `workers` processes; a context manager, or call close().

    Every answer gets `time_limit` seconds, start-up excluded. An answer that exceeds them or whose process dies is
    worth 0 and counted; the others are unaffected, and the process is replaced. A batch has the time of its answers
    together, and shares its fate. Concurrent asynchronous calls are affected only by what blocks their process. Equal
    answers in one call are graded once. Processes are forked from a small server, never from this (possibly
    multi-threaded) process, and import no torch unless a reward does. They write no core dump and no file above 1 GiB.
    If all rewards are of this package they have no network, where the system (Linux) allows that.

    Args:
        reward: name of the default reward, see `exgrpo.train.reward.names`.
        others: names of further rewards.
        workers: number of processes.
        time_limit: seconds per answer.
        concurrency: calls of an asynchronous reward in flight per process.
        parts: weights of parts by name; 1 for parts without one.
        memory_gib: GiB that a process may allocate for a call, and keep over all calls; an answer that exceeds it
            fails.
        network: True if the user's functions may use the network.
        form: form in which rewards of this package look for the answer, see `exgrpo.train.reward.grading.FORMS`.

    Raises:
        RewardError: a reward cannot be resolved.
        GraderError: the processes do not start, or cannot be kept from the network as configured.
    """

    def __init__(
        self,
        reward: str,
        *others: str,
        workers: int,
        time_limit: float,
        concurrency: int = 1,
        parts: Mapping[str, float] | None = None,
        memory_gib: float = 4.0,
        network: bool = True,
        form: str = AUTO,
    ) -> None:
        self._default = reward
        self._form = form
        self._rewards = {name: absolute(name) for name in (reward, *others)}
        self._workers = workers
        self._bounds = Bounds(time_limit, int(memory_gib * GIB), network)
        self._concurrency = concurrency
        self._weights = dict(parts or {})
        self._parts: dict[str, frozenset[str]] = {}
        self._contracts: dict[str, Contract] = {}
        self._closed = False
        self.offline = False
        """True if the processes have no network."""
        self._pool = self._start()

    @classmethod
    def of(cls, rewards: Iterable[str], options: Any, **changes: Any) -> Self:
        """Return a grader with these rewards (at least one) and the options of a `RewardConfig`, updated by `changes`.

        Raises RewardError as the constructor does, and if a form is set that none of the rewards would use.
        """
        names = list(dict.fromkeys(rewards))
        settings = {name: getattr(options, name) for name in _OPTIONS} | changes
        if settings["form"] != AUTO and all(map(is_own, names)):
            raise RewardError(
                f"reward.form={options.form} applies to the rewards of this package only, and {shown(names[0])} "
                "always gets the whole response: leave the option out"
            )
        return cls(*names, **settings)

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the processes and abandon unfinished grading; may be called again."""
        self._closed = True
        self._stop()

    def grade(self, answers: Sequence[tuple[str, str]]) -> Grades:
        """Grade (response, gold) pairs with the default reward; blocks until all are graded.

        Raises as `begin` and `Grading.finish` do.
        """
        grading = self.begin()
        for response, gold in answers:
            grading.add(response, gold)
        return grading.finish()

    def begin(self) -> "Grading":
        """Start grading answers that arrive one by one; raises ValueError after close()."""
        if self._closed:
            raise ValueError("the grader is closed")
        return Grading(self, self._rewards, self._default, self._form)

    def columns(self, reward: str) -> Columns:
        """Return the columns of a row that one of the rewards takes."""
        return self._contracts[self._rewards[reward]].columns

    def together(self, reward: str) -> int:
        """Return the number of answers that a process grades at a time; `reward` is an absolute name."""
        return self._contracts[reward].together(self._concurrency)

    def schedule(self, call: _Call) -> "_Scheduled":
        """Submit a call to the pool."""
        seconds = self._contracts[call[0].reward].seconds(len(call), self._bounds.time_limit)
        try:
            future = self._pool.schedule(grade, args=(call, seconds), timeout=seconds)
        except RuntimeError:  # the pool is broken, as when an idle process was killed
            future = None
        return _Scheduled(self._pool, future, len(call))

    def schedule_again(self, scheduled: dict[_Call, "_Scheduled"]) -> None:
        """Resubmit the calls that were not graded before their pool broke to a new pool."""
        if not self._pool.active:
            self._stop()
            self._pool = self._start()
        for call, one in scheduled.items():
            if not one.pool.active and one.outcomes() is None:
                scheduled[call] = self.schedule(call)

    def _stop(self) -> None:
        self._pool.stop()
        self._pool.join()

    def cause(self, outcome: Outcome) -> str | None:
        """Return why an answer could not be graded, None if it was."""
        limit = self._bounds.time_limit
        return f"it took longer than reward.time_limit ({limit:g} s)" if outcome.timed_out else outcome.error

    def check(self, answers: Sequence["_Pending"], outcomes: Sequence[Outcome]) -> None:
        """Raise RewardError for values that are no reward or no key, and for inconsistent parts."""
        for (reward, question, task), outcome in zip(answers, outcomes, strict=True):
            if misuse := outcome.misuse or self._other_parts(reward, outcome):
                returned, rule = misuse
                answer = f". The answer ends: {task.response[-SHOWN:]!r}" if task else ""
                raise RewardError(
                    f"reward {reward!r} returned {returned} for an answer to {shown(question)}: {rule}. Fix the "
                    "function and start again: a run goes on from its checkpoint with --resume auto, an evaluation "
                    f"with the same command{answer}"
                )
        known = set().union(*self._parts.values())
        strange = [name for name in self._weights if name not in known]
        if strange and len(self._parts) == len(set(self._rewards.values())):
            raise RewardError(
                f"reward.parts has a weight of {shown(strange[0])}, and the parts of the rewards are "
                f"{', '.join(sorted(known)) or 'none'}"
            )

    def _other_parts(self, reward: str, outcome: Outcome) -> tuple[str, str] | None:
        """Return a misuse, as `Outcome.misuse`, if the parts differ from those of the reward's first answer."""
        if outcome.timed_out or outcome.error is not None:
            return None
        names = frozenset(outcome.parts)
        if names == (first := self._parts.setdefault(reward, names)):
            return None
        before, now = (shown(", ".join(sorted(one))) if one else "no parts" for one in (first, names))
        return now, f"it returned {before} before, and a reward has the same parts in every answer"

    def _start(self) -> ProcessPool:
        context = multiprocessing.get_context("forkserver")
        # multiprocessing runs the main module again in each process; the server preloads its imports. The main module
        # itself must not be preloaded: runpy warns about that in a program started by `python -m`.
        context.set_forkserver_preload(["exgrpo.train.reward.worker", "math_verify", "exgrpo.train.run.startup_checks"])
        pool = ProcessPool(
            max_workers=self._workers,
            initializer=start_worker,
            initargs=(tuple(self._rewards.values()), self._bounds, self._weights),
            context=context,
        )
        report: tuple[dict[str, Contract], bool] | Exception
        died = f"a grading process died while it loaded reward {', '.join(map(repr, self._rewards.values()))}"
        try:
            future = pool.schedule(start_report)
            _wait(pool, future, START_SECONDS)
            report = future.result(timeout=0)
        except FutureTimeoutError:
            late = f"the grading processes did not start within {START_SECONDS:.0f} s"
            report = GraderError(late if pool.active else died)
        except (RuntimeError, ProcessExpired) as error:  # RuntimeError: the pool broke, before or after the call
            report = GraderError(f"{died}: {error}")
        if isinstance(report, Exception):
            pool.stop()
            pool.join()
            raise report
        self._contracts, self.offline = report
        return pool


class _Pending(NamedTuple):
    reward: str
    question: str
    task: Task | None  # None: nothing in it decides its grade, which is 0


class Grading:
    """Answers that are graded while more arrive; see `Grader.begin`.

    `add` may be called in a thread of its own; `finish`, which replaces broken processes, must run in the thread that
    otherwise uses the grader.
    """

    def __init__(self, grader: Grader, rewards: dict[str, str], default: str, form: str) -> None:
        self._grader = grader
        self._rewards = rewards
        self._default = default
        self._decisive_part = {name: decisive_part_of(name, form) for name in rewards}
        self._answers: list[_Pending] = []
        self._waiting: dict[str, list[Task]] = {}
        """Answers by reward that wait for a full batch."""
        self._known: set[Task] = set()
        self._scheduled: dict[_Call, _Scheduled] = {}

    def add(
        self,
        response: str,
        gold: str,
        question: str | None = None,
        reward: str | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        """Start grading one more answer with one of the grader's rewards; None: the default.

        Messages name the question if given, else the gold answer. Raises DataError if the reward takes a column that is
        not in `columns`.
        """
        name = self._default if reward is None else reward
        question = gold if question is None else question
        part = self._decisive_part[name](response)
        task = None if part is None else Task(self._rewards[name], part, gold, self._taken(name, columns, question))
        self._answers.append(_Pending(self._rewards[name], question, task))
        if task is not None and task not in self._known:
            self._known.add(task)
            waiting = self._waiting.setdefault(task.reward, [])
            waiting.append(task)
            if len(waiting) == self._grader.together(task.reward):
                self._send(task.reward)

    def _taken(self, reward: str, columns: Mapping[str, Any] | None, question: str) -> bytes:
        try:
            taken = self._grader.columns(reward).of(columns or {})
        except DataError as error:
            raise DataError(f"the row of {shown(question)} {error}") from None
        return pickle.dumps(taken) if taken else b""

    def _send(self, reward: str) -> None:
        call = tuple(self._waiting.pop(reward))
        self._scheduled[call] = self._grader.schedule(call)

    def _outcomes(self, call: _Call) -> list[Outcome]:
        """Return the outcomes of a call, resubmitting it if its pool breaks."""
        for _ in range(_MOST_BREAKS):
            found = self._scheduled[call].outcomes()
            if found is not None:
                return found
            self._grader.schedule_again(self._scheduled)
        return [Outcome(error="the grading processes died at once")] * len(call)

    def finish(self) -> Grades:
        """Return the grades of all answers in the order of `add`; blocks until all are graded.

        Raises RewardError if a reward returns something other than a finite number within +-LARGEST_REWARD or a mapping
        of names to such numbers, or other names than before, or if a key function does not return a text.
        """
        for reward in list(self._waiting):
            self._send(reward)
        done: dict[Task, Outcome] = {}
        for call in self._scheduled:
            done.update(zip(call, self._outcomes(call), strict=True))
        results = [Outcome() if one.task is None else done[one.task] for one in self._answers]
        self._grader.check(self._answers, results)
        return Grades(
            reward=tuple(outcome.reward for outcome in results),
            timed_out=sum(outcome.timed_out for outcome in results),
            failed=sum(outcome.error is not None for outcome in results),
            key=tuple(outcome.key for outcome in results),
            parts=tuple(outcome.parts for outcome in results) if any(outcome.parts for outcome in results) else (),
            failures=by_kind(
                Failure(reward, cause, question, task.gold, task.response)
                for (reward, question, task), outcome in zip(self._answers, results, strict=True)
                if task is not None and (cause := self._grader.cause(outcome))
            ),
        )


def _wait(pool: ProcessPool, future: Future, seconds: float = math.inf) -> None:
    """Wait until the future is done, its pool is broken (which may leave the future pending), or `seconds` are over."""
    end = time.monotonic() + seconds
    while not future.done() and pool.active and time.monotonic() < end:
        wait([future], timeout=1.0)


@dataclass(frozen=True)
class _Scheduled:
    """A call with `size` answers submitted to a pool."""

    pool: ProcessPool
    future: Future | None
    size: int

    def outcomes(self) -> list[Outcome] | None:
        """Wait for the [size] outcomes; None if the pool broke before they were graded."""
        if self.future is None:
            return None
        _wait(self.pool, self.future)
        try:
            return self.future.result(timeout=0)
        except FutureTimeoutError:
            return [Outcome(timed_out=True)] * self.size if self.future.done() else None
        except ProcessExpired as error:
            kept = "it kept more memory than reward.memory_gib of the answers so far"
            why = kept if error.exitcode == TOO_MUCH_KEPT else f"exit code {error.exitcode}"
            return [Outcome(error=f"the grading process died ({why})")] * self.size
        except (BrokenProcessPool, CancelledError):
            return None
