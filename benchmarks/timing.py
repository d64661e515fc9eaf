"""Measurement of groups of rows, reported to pytest-benchmark one by one.

pytest-benchmark times one test after the other. Here the first test of a group measures the whole group, round by round
(`exgrpo.tools.timing`), and each test then reports the times of its own row.
"""

import math
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from benchmarks.heads import FLOOR, OURS
from benchmarks.measure import Budget, Results
from exgrpo.tools.timing import FEWEST_ROUNDS, LOG, paired_ratio

BUDGETS = {"tiny": Budget(0.0), "small": Budget(4.0, FEWEST_ROUNDS, patience=3.0), "full": Budget(20.0)}
"""By `--sizes`, on a CPU."""
GPU_SHARE = 0.25  # of the seconds on a GPU, whose calls are shorter and steadier


def budget(options: Namespace, device: torch.device) -> Budget:
    """Return the budget of a group by the options of `conftest`."""
    found, share = BUDGETS[options.sizes], GPU_SHARE if device.type == "cuda" else 1.0
    return replace(found, budget=share * found.budget, in_a_row=options.in_a_row)


class Clock:
    """A timer for pytest-benchmark that returns the time set in `now`."""

    __name__ = "interleaved"
    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


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
        _hand_over(benchmark, mine.seconds)


def _hand_over(benchmark: Any, seconds: Sequence[float]) -> None:
    """Report measured times to pytest-benchmark, whose timer must be CLOCK, as one round each."""
    remaining = iter(seconds)

    def rewind() -> None:
        CLOCK.now = 0.0

    def advance() -> None:
        CLOCK.now = next(remaining)

    benchmark.pedantic(advance, setup=rewind, rounds=len(seconds))
