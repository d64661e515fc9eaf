"""Groups of rows that are measured together, once, when the first of their tests asks."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.timing import replay
from exgrpo.kernels.timing import paired_ratio
from exgrpo.tools.bench import Results
from exgrpo.tools.heads import FLOOR, OURS


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
