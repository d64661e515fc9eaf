"""Groups of rows that are measured together, once, when the first of their tests asks."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from benchmarks.memory import peak_bytes
from benchmarks.timing import Call, interleave, paired_ratio, replay

FLOOR = "floor"
OURS = "exgrpo"
"""How the names of our rows begin."""


@dataclass(frozen=True)
class Result:
    """What is known of one row.

    Attributes:
        seconds: of each round; empty where it did not run.
        reason: why it cannot run here.
        failure: what it raised.
        peak_bytes: see `memory.peak_bytes`.
        facts: what else there is to report, by name.
    """

    seconds: tuple[float, ...] = ()
    reason: str = ""
    failure: str = ""
    peak_bytes: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)


Results = dict[str, Result]


def race(
    calls: dict[str, Call],
    device: torch.device,
    budget: float,
    facts: dict[str, dict[str, Any]],
    in_a_row: int = 1,
) -> Results:
    """Time calls against each other, see `interleave`, then take the peak memory of each."""
    seconds, failed = interleave(calls, device, budget, in_a_row)
    results = {name: Result(failure=failure) for name, failure in failed.items()}
    for name, of_row in seconds.items():
        results[name] = Result(tuple(of_row), peak_bytes=peak_bytes(calls[name], device), facts=facts.get(name, {}))
    return results


class Races:
    """The results of all groups so far.

    Args:
        ours: name of the row that others are compared with.
        deadline: of `time.monotonic`, after which no group is begun.
    """

    def __init__(self, ours: str, deadline: float = math.inf) -> None:
        self.ours = ours
        self.deadline = deadline
        self.results: dict[str, Results] = {}
        self.rows: list[dict[str, Any]] = []
        """What was reported, in the form of `record.Record.rows`."""

    def left_out(self) -> dict[str, list[str]]:
        """Why rows did not run, by their names; what a row raised comes with its group."""
        reasons: dict[str, list[str]] = {}
        for group, results in self.results.items():
            for row, result in results.items():
                reason = result.reason or (f"{group}: {result.failure}" if result.failure else "")
                if reason and reason not in reasons.get(row, []):
                    reasons.setdefault(row, []).append(reason)
        return reasons

    def run(self, group: str, row: str, measure: Callable[[], Results], benchmark: Any) -> None:
        """Report a row of a group to pytest-benchmark; `measure` gives the group's results where it is a new one.

        Skips the test where the row did not run; where one of ours raised something, the test fails.
        """
        if group not in self.results:
            if time.monotonic() >= self.deadline:
                pytest.skip("its time is up")
            self.results[group] = measure()
        results = self.results[group]
        mine = results[row]
        if mine.failure and row.startswith(OURS):
            pytest.fail(mine.failure)
        if not mine.seconds:
            pytest.skip(mine.reason or mine.failure)
        benchmark.group = group
        benchmark.extra_info |= {"row": row, "peak_bytes": mine.peak_bytes, **mine.facts}
        if FLOOR in results:
            benchmark.extra_info["floor_over_time"] = paired_ratio(results[FLOOR].seconds, mine.seconds)
        ours = results.get(self.ours)
        if ours is not None and ours.seconds:
            benchmark.extra_info["times_ours"] = paired_ratio(mine.seconds, ours.seconds)
        self.rows.append({"group": group, "median": statistics.median(mine.seconds), **benchmark.extra_info})
        replay(benchmark, mine.seconds)
