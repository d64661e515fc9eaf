"""A pool of processes that grades answers under a hard time limit."""

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
from typing import Any, Self

from pebble import ProcessExpired, ProcessPool
from pebble.pool import process as of_pebble

from exgrpo.train.common.errors import SHOWN, DataError, GraderError, RewardError, shown
from exgrpo.train.common.records import Failure, by_kind
from exgrpo.train.reward.contract import Columns, Contract, Outcome
from exgrpo.train.reward.names import AUTO, absolute, decisive_part_of, is_own
from exgrpo.train.reward.worker import GIB, TOO_MUCH_KEPT, Bounds, Task, grade, start_report, start_worker

_Call = tuple[Task, ...]
"""The answers that a grading process takes together; of most rewards one."""

# pebble measures time limits by the clock of the day: where that is set forward, all answers in flight would be over
# their limit, and be worth 0.
of_pebble.time = SimpleNamespace(time=time.monotonic, sleep=time.sleep)

START_SECONDS = 300.0
_OPTIONS = ("workers", "time_limit", "concurrency", "parts", "memory_gib", "network", "form")
"""Of a `RewardConfig`."""
_MOST_BREAKS = 3
"""Of pools, before one answer is graded."""


@dataclass(frozen=True)
class Grades:
    """What grading a list of N answers gave."""

    reward: tuple[float, ...]
    """[N], in the order of the answers; 0.0 for those that timed out or failed."""
    timed_out: int
    """How many of the N answers hit the time limit."""
    failed: int
    """How many of the N answers made the reward raise, or its process die."""
    key: tuple[int, ...]
    """[N] of the solution in each answer: equal for answers to a question that differ in form only, 63 bits of a hash.
    0: it has none, or the answer timed out or failed."""
    parts: tuple[Mapping[str, float], ...] = ()
    """[N] the parts of each reward by name, without their weights; empty: no reward has any."""
    failures: tuple[Failure, ...] = ()
    """Those that timed out or failed, by kind."""


class Grader:
    """Grades answers with one or several rewards in `workers` processes; use it as a context manager or call close().

    Every answer gets `time_limit` seconds of its own, start-up excluded. One that exceeds them or whose process dies is
    worth 0 and counted; the others are unaffected, and the process is replaced. A batch has the time of its answers
    together, and what happens to it happens to all of them. Only what blocks a process costs the asynchronous calls
    beside it. Equal answers in one call are graded once. Processes are forked from a small server, never from this
    (possibly multi-threaded) process, and import no torch unless a reward does. They write no core, and no file of
    more than 1 GiB. Where all rewards are of this package they have no network, if the system (Linux) allows that.

    Args:
        reward: name of the first reward, see `exgrpo.train.reward.names`.
        others: those of further ones.
        workers: number of processes.
        time_limit: seconds per answer.
        concurrency: so many calls of an asynchronous reward are in flight in a process.
        parts: weights of parts by name; 1 of those without.
        memory_gib: GiB that a process may take for a call, and keep of all calls together; an answer that takes more
            fails.
        network: whether functions of the user's own may use the network.
        form: in which the rewards of this package look for the answer, see `exgrpo.train.reward.grading.FORMS`.

    Raises RewardError for a reward that cannot be resolved and GraderError when the processes do not start or cannot be
    kept from the network as asked, both at construction.
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
        """Whether the processes cannot reach the network."""
        self._pool = self._start()

    @classmethod
    def of(cls, rewards: Iterable[str], options: Any, **changes: Any) -> Self:
        """A grader with these rewards, at least one, and the options of a `RewardConfig`, some of them changed.

        Raises RewardError as the constructor does, and where a form is set that none of the rewards would read.
        """
        names = list(dict.fromkeys(rewards))
        settings = {name: getattr(options, name) for name in _OPTIONS} | changes
        if settings["form"] != AUTO and all(map(is_own, names)):
            raise RewardError(
                f"reward.form={options.form} tells the rewards of this package where the answer stands; "
                f"{shown(names[0])} reads the whole response by itself: leave the option out"
            )
        return cls(*names, **settings)

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the processes; unfinished grading is abandoned. May be called again."""
        self._closed = True
        self._stop()

    def grade(self, answers: Sequence[tuple[str, str]]) -> Grades:
        """Grades (response, gold) pairs with the first reward; blocks until all are graded.

        Raises as `begin` and `Grading.finish` do.
        """
        grading = self.begin()
        for response, gold in answers:
            grading.add(response, gold)
        return grading.finish()

    def begin(self) -> "Grading":
        """Begin to grade answers that come one by one. Raises ValueError after close()."""
        if self._closed:
            raise ValueError("the grader is closed")
        return Grading(self, self._rewards, self._default, self._form)

    def columns(self, reward: str) -> Columns:
        """The columns of a row that one of the rewards takes."""
        return self._contracts[self._rewards[reward]].columns

    def together(self, reward: str) -> int:
        """How many answers a process takes at a time, of a reward by its absolute name."""
        return self._contracts[reward].together(self._concurrency)

    def schedule(self, call: _Call) -> "_Scheduled":
        """Have answers graded in the background."""
        seconds = self._contracts[call[0].reward].seconds(len(call), self._bounds.time_limit)
        try:
            future = self._pool.schedule(grade, args=(call, seconds), timeout=seconds)
        except RuntimeError:  # the pool is broken: idle processes may be killed too
            future = None
        return _Scheduled(self._pool, future, len(call))

    def schedule_again(self, scheduled: dict[_Call, "_Scheduled"]) -> None:
        """Have the calls of pools that broke before they were graded, graded in a new one."""
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
        """Why an answer could not be graded; None: it was."""
        limit = self._bounds.time_limit
        return f"it took longer than reward.time_limit ({limit:g} s)" if outcome.timed_out else outcome.error

    def check(
        self,
        rewards: Sequence[str],
        tasks: Sequence[Task | None],
        outcomes: Sequence[Outcome],
        questions: Sequence[str],
    ) -> None:
        """Raises RewardError for what is no reward or no key, and for other parts."""
        for reward, task, outcome, question in zip(rewards, tasks, outcomes, questions, strict=True):
            if misuse := outcome.misuse or self._other_parts(reward, outcome):
                returned, rule = misuse
                answer = f". The answer ends: {task.response[-SHOWN:]!r}" if task else ""
                raise RewardError(
                    f"reward {reward!r} returned {returned} for an answer to {shown(question)}: {rule}. Mend the "
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
        """What a reward returned where its parts are others than in its first answer; as `Outcome.misuse`."""
        if outcome.timed_out or outcome.error is not None:
            return None
        names = frozenset(outcome.parts)
        if names == (first := self._parts.setdefault(reward, names)):
            return None
        before, now = (shown(", ".join(sorted(one))) if one else "no parts" for one in (first, names))
        return now, f"it returned {before} before, and a reward has the same parts in every answer"

    def _start(self) -> ProcessPool:
        context = multiprocessing.get_context("forkserver")
        # Each process runs the main module again, as multiprocessing wants it, and the server has the imports of it
        # ready. It must not have the module itself: runpy warns of that in a program that is run by `python -m`.
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


class Grading:
    """Answers that are graded while more of them come; see `Grader.begin`.

    `add` may be called in a thread of its own; `finish`, which replaces broken processes, belongs into the one that
    uses the grader otherwise.
    """

    def __init__(self, grader: Grader, rewards: dict[str, str], default: str, form: str) -> None:
        self._grader = grader
        self._rewards = rewards
        self._default = default
        self._decisive_part = {name: decisive_part_of(name, form) for name in rewards}
        self._tasks: list[Task | None] = []
        self._names: list[str] = []
        self._questions: list[str] = []
        self._waiting: dict[str, list[Task]] = {}
        """By reward the answers that wait until as many are there as a process takes together."""
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
        """Begin to grade one more answer with one of the grader's rewards; None: its first.

        A message names the question, where it is given, or else the gold answer. Raises DataError where the reward
        takes a column that is not among `columns`.
        """
        name = self._default if reward is None else reward
        question = gold if question is None else question
        part = self._decisive_part[name](response)
        task = None if part is None else Task(self._rewards[name], part, gold, self._taken(name, columns, question))
        self._tasks.append(task)
        self._names.append(self._rewards[name])
        self._questions.append(question)
        if task is not None and task not in self._known:
            self._known.add(task)
            waiting = self._waiting.setdefault(task.reward, [])
            waiting.append(task)
            if len(waiting) == self._grader.together(task.reward):
                self._send(task.reward)

    def _taken(self, reward: str, columns: Mapping[str, Any] | None, question: str) -> bytes:
        """The columns that a reward takes, pickled; empty: none."""
        try:
            taken = self._grader.columns(reward).of(columns or {})
        except DataError as error:
            raise DataError(f"the row of {shown(question)} {error}") from None
        return pickle.dumps(taken) if taken else b""

    def _send(self, reward: str) -> None:
        call = tuple(self._waiting.pop(reward))
        self._scheduled[call] = self._grader.schedule(call)

    def _outcomes(self, call: _Call) -> list[Outcome]:
        """What a call gives; where its pool breaks, it is graded in another one."""
        for _ in range(_MOST_BREAKS):
            found = self._scheduled[call].outcomes()
            if found is not None:
                return found
            self._grader.schedule_again(self._scheduled)
        return [Outcome(error="the grading processes died at once")] * len(call)

    def finish(self) -> Grades:
        """What all answers are worth, in the order of `add`; blocks until all are graded.

        Raises RewardError where a reward returns something other than a finite number within +-LARGEST_REWARD or a
        mapping of names to them, or other names than before, or a key function something other than a text.
        """
        for reward in list(self._waiting):
            self._send(reward)
        done: dict[Task, Outcome] = {}
        for call in self._scheduled:
            done.update(zip(call, self._outcomes(call), strict=True))
        results = [Outcome() if task is None else done[task] for task in self._tasks]
        self._grader.check(self._names, self._tasks, results, self._questions)
        return Grades(
            reward=tuple(outcome.reward for outcome in results),
            timed_out=sum(outcome.timed_out for outcome in results),
            failed=sum(outcome.error is not None for outcome in results),
            key=tuple(outcome.key for outcome in results),
            parts=tuple(outcome.parts for outcome in results) if any(outcome.parts for outcome in results) else (),
            failures=by_kind(
                Failure(task.reward, cause, question, task.gold, task.response)
                for task, outcome, question in zip(self._tasks, results, self._questions, strict=True)
                if task is not None and (cause := self._grader.cause(outcome))
            ),
        )


def _wait(pool: ProcessPool, future: Future, seconds: float = math.inf) -> None:
    """Until the future is done, or its pool broken, which may leave it undone, or the seconds are over."""
    end = time.monotonic() + seconds
    while not future.done() and pool.active and time.monotonic() < end:
        wait([future], timeout=1.0)


@dataclass(frozen=True)
class _Scheduled:
    """A call with `size` answers that a pool grades in the background; one that is broken does not."""

    pool: ProcessPool
    future: Future | None
    size: int

    def outcomes(self) -> list[Outcome] | None:
        """[size] waits for them; None when the pool broke before they were graded."""
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
