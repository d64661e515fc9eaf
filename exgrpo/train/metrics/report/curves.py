"""Curves over one or several runs, and the 95 % intervals of their means."""

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
MetricColumns = dict[str, FloatArray]
"""Numbers by name, one per step, NaN where a step lacks one; "step" is strictly increasing."""
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


class Curve(NamedTuple):
    """Points of a line; `low` and `high` are the bounds of the interval around y, or None."""

    x: FloatArray
    y: FloatArray
    low: FloatArray | None = None
    high: FloatArray | None = None


def half_width(values: FloatArray) -> FloatArray:
    """Return half the 95 % confidence interval (Student's t) of the mean over the first axis of [runs, ...]."""
    freedom = len(values) - 1
    # Cornish and Fisher's expansion around the normal quantile: its error is below 5e-4 from 11 degrees on.
    quantile = 1.95996 + 2.37227 / freedom + 2.82250 / freedom**2 + 2.55585 / freedom**3
    quantile = STUDENT_T[freedom - 1] if freedom <= len(STUDENT_T) else quantile
    return quantile * values.std(axis=0, ddof=1) / math.sqrt(len(values))


def mean_curve(runs: Sequence[MetricColumns], x: str, y: str, interval: Sequence[str] = ()) -> Curve:
    """Average runs at the steps where every run has the numbers; runs without any of them are left out.

    x is averaged, too, so that a mean is drawn at its mean cost. `interval` names the two columns with the bounds of
    the interval of a single run.
    """
    known = [(run, np.isfinite(run[x] + run[y])) for run in runs if {x, y} <= run.keys()]
    having = [(run, run["step"][there]) for run, there in known if there.any()]
    if not having:
        return Curve(np.empty(0), np.empty(0))
    steps = reduce(np.intersect1d, [reached for _, reached in having])
    rows = [(run, np.searchsorted(run["step"], steps)) for run, _ in having]
    xs, ys = (np.array([run[name][row] for run, row in rows]) for name in (x, y))
    mean = ys.mean(axis=0)
    if len(rows) > 1:
        return Curve(xs.mean(axis=0), mean, mean - half_width(ys), mean + half_width(ys))
    ends = [run[end][row] for run, row in rows for end in interval if len(runs) == 1 and end in run]
    return Curve(xs[0], mean, *ends) if len(ends) == 2 and np.isfinite(ends).all() else Curve(xs[0], mean)
