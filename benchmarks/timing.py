"""Calls timed in turns, reported to pytest-benchmark one by one.

pytest-benchmark times one test after the other: on a machine whose clock or load changes, the ratio of two rows would
be the ratio of two moments. Here the first test of a group measures the whole group, round by round, and each test then
reports the times of its own row.
"""

import gc
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from benchmarks.memory import peak_bytes

FLOOR, OURS, PLAIN = "floor", "exgrpo", "full logits"
"""Row names: bare products, prefix of the rows that must not fail, plain torch."""
FLUSHED_BYTES = 128 << 20
"""Written between two calls, so that none finds its inputs in a cache: more than most last-level caches hold."""
MOST_ROUNDS = 50
LOG = logging.getLogger(__name__)
"""The group that is measured."""

Call = Callable[[], Any]


@dataclass(frozen=True)
class Budget:
    """Limits of the rounds of a group."""

    seconds: float  # to spend on rounds
    least: int = 5  # rounds that run whatever time they take
    patience: float = math.inf  # a call that takes this multiple of the fastest one in the first round is in no other
    in_a_row: int = 1  # calls in each turn: a GPU that is busy before a call has a lower clock and hides launches


def wait(device: torch.device) -> None:
    """Wait until all work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleave(
    calls: dict[str, Call], device: torch.device, budget: Budget, *, warm: bool = False
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the seconds of each call in each round, and the messages of calls that failed in the warm-up.

    Each call is warmed up once (compiled, its memory taken), unless all are `warm`. A round runs every call once;
    another one goes first in each. Caches are flushed before every call, the garbage collector is off, and the device
    is waited for.
    """
    stream = torch.empty(FLUSHED_BYTES // 4, device=device)

    def timed(call: Call) -> float:
        stream.fill_(1.0)
        wait(device)
        start = time.perf_counter()
        for _ in range(budget.in_a_row):
            call()
        wait(device)
        return (time.perf_counter() - start) / budget.in_a_row

    failed = {}
    for name, call in () if warm else calls.items():
        try:
            timed(call)
        except Exception as error:  # whatever a peer raises is the reason why its row is skipped
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    names = [name for name in calls if name not in failed]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        stop, done = time.perf_counter() + budget.seconds, 0
        while names and (done < budget.least or (done < MOST_ROUNDS and time.perf_counter() < stop)):
            first = done % len(names)
            for name in names[first:] + names[:first]:
                seconds[name].append(timed(calls[name]))
            done += 1
            if done == 1:
                limit = budget.patience * min(times[0] for times in seconds.values())
                names = [name for name in names if seconds[name][0] <= limit]
    finally:
        gc.enable()
    return seconds, failed


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the median over common rounds of the ratio of times: what the machine did to both rows cancels."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=False))


def paired_spread(numerator: Sequence[float], denominator: Sequence[float]) -> tuple[float, float, float]:
    """Return `paired_ratio`, with the quartiles of the rounds' ratios."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios
    return median, low, high


@dataclass(frozen=True)
class Result:
    """Measurements of one row."""

    seconds: tuple[float, ...] = ()  # per round; empty if it did not run
    reason: str = ""  # why it cannot run here
    failure: str = ""  # the error that it raised
    peak_bytes: int | None = None  # see `memory.peak_bytes`; None: unknown
    facts: dict[str, Any] = field(default_factory=dict)  # further numbers to report


Results = dict[str, Result]


def race(
    calls: dict[str, Call],
    device: torch.device,
    budget: Budget,
    facts: Mapping[str, dict[str, Any]],
    *,
    warm: bool = False,
) -> Results:
    """Time calls in turns, see `interleave`, then measure the peak memory of each."""
    seconds, failed = interleave(calls, device, budget, warm=warm)
    results = {name: Result(failure=failure) for name, failure in failed.items()}
    for name, of_row in seconds.items():
        try:
            peak = peak_bytes(calls[name], device)
        except OSError:  # the system keeps no high-water mark
            peak = None
        results[name] = Result(tuple(of_row), peak_bytes=peak, facts=facts.get(name, {}))
    return results


NOW = [0.0]


def clock() -> float:
    """Return the time set in NOW: the timer of pytest-benchmark for measured rows."""
    return NOW[0]


@dataclass
class Groups:
    """The groups measured so far."""

    ours: str  # name of the row that others are compared with
    deadline: float = math.inf  # of `time.monotonic`, after which no group is started
    results: dict[str, Results] = field(default_factory=dict)  # by group
    rows: list[dict[str, Any]] = field(default_factory=list)  # reported rows, as in `record.Record`

    def left_out(self) -> dict[str, list[str]]:
        """Return why rows did not run, by name; errors are given with their group."""
        reasons: dict[str, list[str]] = {}
        for group, results in self.results.items():
            for row, result in results.items():
                reason = result.reason or (f"{group}: {result.failure}" if result.failure else "")
                if reason and reason not in reasons.get(row, []):
                    reasons.setdefault(row, []).append(reason)
        return reasons

    def report(self, group: str, row: str, measure: Callable[[], Results], benchmark: Any) -> None:
        """Report a row to pytest-benchmark; `measure` returns all rows of a group that has not been measured.

        It skips the test if the row did not run, and fails it if the row is ours and raised an error.
        """
        if group not in self.results:
            if time.monotonic() >= self.deadline:
                pytest.skip("the time limit is reached")
            LOG.info(group)
            self.results[group] = measure()
        results = self.results[group]
        mine, ours = results[row], results.get(self.ours)
        if mine.failure and row.startswith(OURS):
            pytest.fail(mine.failure)
        if not mine.seconds:
            pytest.skip(mine.reason or mine.failure)
        benchmark.group = group
        benchmark.extra_info |= {"row": row, "peak_bytes": mine.peak_bytes, **mine.facts}
        if FLOOR in results:
            benchmark.extra_info["floor_over_time"] = paired_ratio(results[FLOOR].seconds, mine.seconds)
        if ours is not None and ours.seconds:
            benchmark.extra_info["times_ours"] = paired_ratio(mine.seconds, ours.seconds)
        self.rows.append({"group": group, "median": statistics.median(mine.seconds), **benchmark.extra_info})
        times = iter([moment for of_round in mine.seconds for moment in (0.0, of_round)])

        def tick() -> None:
            NOW[0] = next(times)

        benchmark.pedantic(tick, setup=tick, rounds=len(mine.seconds))  # each round begins at 0 for `clock`
