"""Runs as curves: points, means over runs with their confidence interval, fewer points where there are too many."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Columns = dict[str, FloatArray]
"""Numbers by name, one per record, NaN where a record lacks one; "step" is always there and strictly increasing."""

MAX_POINTS = 1000
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, eq=False)
class Curve:
    """Points of a line; `low` and `high` are the ends of the interval around y, or None where it has none."""

    x: FloatArray
    y: FloatArray
    low: FloatArray | None = None
    high: FloatArray | None = None


def half_width(values: FloatArray) -> FloatArray:
    """Half the 95 % confidence interval (Student's t) of the mean over the first axis of [runs, points]."""
    runs = len(values)
    return student_t(runs - 1) * values.std(axis=0, ddof=1) / math.sqrt(runs)


def student_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t distribution."""
    if freedom <= len(STUDENT_T):
        return STUDENT_T[freedom - 1]
    # Cornish and Fisher's expansion around the normal quantile; right to 5e-4 from here on.
    z = NormalDist().inv_cdf(0.975)
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(term / freedom**power for power, term in enumerate(terms))


def curve(run: Columns, x: str, y: str, interval: tuple[str, str] | None = None) -> Curve:
    """The points of a run where both numbers exist, with the columns of their interval where it has these."""
    there = _there(run, x, y)
    if not there.any():
        return Curve(np.empty(0), np.empty(0))
    ends = [run[end][there] for end in interval or () if end in run]
    known = len(ends) == 2 and bool(np.isfinite(ends).all())
    return Curve(run[x][there], run[y][there], *(ends if known else ()))


def mean_curve(runs: Sequence[Columns], x: str, y: str, interval: tuple[str, str] | None = None) -> Curve:
    """Mean and interval over runs, at the steps at which every run that has these numbers at all has them.

    x is averaged as well: a mean over runs stands at the mean cost of its step. A single run has its own interval.
    """
    having = [run for run in runs if _there(run, x, y).any()]
    if len(having) < 2:
        return curve(having[0] if having else runs[0], x, y, interval if len(runs) == 1 else None)
    steps: FloatArray = reduce(np.intersect1d, [run["step"][_there(run, x, y)] for run in having])
    rows = [np.searchsorted(run["step"], steps) for run in having]
    xs = np.array([run[x][row] for run, row in zip(having, rows, strict=True)])
    ys = np.array([run[y][row] for run, row in zip(having, rows, strict=True)])
    mean, half = ys.mean(axis=0), half_width(ys)
    return Curve(xs.mean(axis=0), mean, mean - half, mean + half)


def _there(run: Columns, x: str, y: str) -> npt.NDArray[np.bool_]:
    missing = np.full(len(run["step"]), np.nan)
    return np.isfinite(run.get(x, missing)) & np.isfinite(run.get(y, missing))


def thin(line: Curve) -> Curve:
    """The same line with at most MAX_POINTS points, each the mean of equally many neighbours."""
    block = math.ceil(len(line.x) / MAX_POINTS)
    if block <= 1:
        return line
    starts = np.arange(0, len(line.x), block)
    count = np.diff([*starts, len(line.x)])
    means: list[Any] = [
        None if of is None else np.add.reduceat(of, starts) / count for of in (line.x, line.y, line.low, line.high)
    ]
    return Curve(*means)
