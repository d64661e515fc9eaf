"""A pool of processes that grades answers under a hard time limit."""

import math
import multiprocessing
import warnings
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass

from pebble import ProcessExpired, ProcessPool

from exgrpo.train.errors import GraderError, RewardError, shown
from exgrpo.train.reward.names import absolute, decisive_part_of
from exgrpo.train.reward.worker import Outcome, grade, start_problem, start_worker

_Task = tuple[str, str, str]  # the reward, the part of a response that decides, and the gold answer

START_SECONDS = 300.0
_EMPTY_ROUNDS = 3


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


class Grader:
    """Grades answers with one or several rewards in `workers` processes; use it as a context manager or call close().

    Every answer gets `time_limit` seconds of its own, start-up excluded. An answer that exceeds them (its process is
    killed, whatever it is doing) or whose process dies is worth 0 and counted; the others are unaffected and the
    process is replaced. Equal answers in one call are graded once. Processes are forked from a small server, never
    from this (possibly multi-threaded) process, and import the rewards only.

    Raises RewardError for a reward that cannot be resolved and GraderError when the processes do not start, both at
    construction.
    """

    def __init__(self, reward: str, *others: str, workers: int, time_limit: float) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        if not (math.isfinite(time_limit) and time_limit > 0):
            raise ValueError(f"time_limit must be a positive number of seconds, got {time_limit}")
        self._default = reward
        self._rewards = {name: absolute(name) for name in (reward, *others)}
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
        return Grading(self, self._rewards, self._default)

    def schedule(self, task: _Task) -> "_Scheduled":
        """Have a task graded in the background. Raises RuntimeError when the pool is broken."""
        pool = self._pool
        return _Scheduled(pool, pool.schedule(grade, args=task, timeout=self._time_limit))

    def grade_round(self, tasks: list[_Task], scheduled: dict[_Task, "_Scheduled"]) -> dict[_Task, Outcome]:
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

    def report(self, rewards: Sequence[str], outcomes: Sequence[Outcome], questions: Sequence[str]) -> None:
        """Raises RewardError for what is no reward or no key, and warns of the first failure."""
        for reward, outcome, question in zip(rewards, outcomes, questions, strict=True):
            if outcome.misuse is not None:
                returned, rule = outcome.misuse
                raise RewardError(
                    f"reward {reward!r} returned {returned} for an answer to {shown(question)}: {rule}. Mend the "
                    "function and start again: a run goes on from its checkpoint with --resume auto, an evaluation "
                    "with the same command"
                )
            if outcome.error is not None and not self._warned:
                self._warned = True
                warnings.warn(
                    f"reward {reward!r} failed on an answer, which is therefore worth 0 (further failures are only "
                    f"counted): {outcome.error}",
                    stacklevel=4,
                )

    def _start(self) -> ProcessPool:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["exgrpo.train.reward.worker", "math_verify"])
        pool = ProcessPool(
            max_workers=self._workers,
            initializer=start_worker,
            initargs=(tuple(self._rewards.values()), self._time_limit),
            context=context,
        )
        try:
            problem = pool.schedule(start_problem).result(timeout=START_SECONDS)
        except FutureTimeoutError:
            problem = GraderError(f"the grading processes did not start within {START_SECONDS:.0f} s")
        except (BrokenProcessPool, ProcessExpired) as error:
            names = ", ".join(map(repr, self._rewards.values()))
            problem = GraderError(f"a grading process died while it loaded reward {names}: {error}")
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

    def __init__(self, grader: Grader, rewards: dict[str, str], default: str) -> None:
        self._grader = grader
        self._rewards = rewards
        self._default = default
        self._decisive_part = {name: decisive_part_of(name) for name in rewards}
        self._tasks: list[_Task | None] = []
        self._names: list[str] = []
        self._questions: list[str] = []
        self._scheduled: dict[_Task, _Scheduled] = {}

    def add(self, response: str, gold: str, question: str | None = None, reward: str | None = None) -> None:
        """Begin to grade one more answer with one of the grader's rewards; None: its first.

        A message names the question, where it is given, or else the gold answer.
        """
        name = self._default if reward is None else reward
        part = self._decisive_part[name](response)
        task = None if part is None else (self._rewards[name], part, gold)
        self._tasks.append(task)
        self._names.append(self._rewards[name])
        self._questions.append(gold if question is None else question)
        if task is not None and task not in self._scheduled:
            with suppress(RuntimeError):  # a broken pool is replaced in the end
                self._scheduled[task] = self._grader.schedule(task)

    def finish(self) -> Grades:
        """What all answers are worth, in the order of `add`; blocks until all are graded.

        Raises RewardError where a reward returns something other than a finite number within +-LARGEST_REWARD, or a key
        function something other than a text. The first exception that one of them raises is shown as a warning; it and
        all others count as failed.
        """
        pending = list(dict.fromkeys(task for task in self._tasks if task is not None))
        done: dict[_Task, Outcome] = {}
        empty_rounds = 0
        while pending:
            outcomes = self._grader.grade_round(pending, self._scheduled)
            empty_rounds = 0 if outcomes else empty_rounds + 1
            if empty_rounds == _EMPTY_ROUNDS:
                # The pool breaks before any answer is graded: give up on the one it meets first, so that this ends.
                outcomes[pending[0]] = Outcome(error="the grading processes died at once")
            done.update(outcomes)
            pending = [task for task in pending if task not in done]
        results = [Outcome() if task is None else done[task] for task in self._tasks]
        self._grader.report(self._names, results, self._questions)
        return Grades(
            reward=tuple(outcome.reward for outcome in results),
            timed_out=sum(outcome.timed_out for outcome in results),
            failed=sum(outcome.error is not None for outcome in results),
            key=tuple(outcome.key for outcome in results),
        )


@dataclass(frozen=True)
class _Scheduled:
    """An answer that a pool grades in the background."""

    pool: ProcessPool
    future: Future

    def outcome(self) -> Outcome | None:
        """Waits for it; None when the pool broke before it was graded."""
        while not self.future.done() and self.pool.active:  # a pool that breaks may leave futures undone
            wait([self.future], timeout=1.0)
        try:
            return self.future.result(timeout=0)
        except FutureTimeoutError:
            return Outcome(timed_out=True) if self.future.done() else None
        except ProcessExpired as error:
            return Outcome(error=f"the grading process died (exit code {error.exitcode})")
        except (BrokenProcessPool, CancelledError):
            return None
