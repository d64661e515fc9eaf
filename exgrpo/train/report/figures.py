"""Curves as figures of plotly.js: plain dictionaries without colours, which plots.js adds by the page's mode.

What `meta` of a trace says is for plots.js: `paint`, a colour of the style sheet or a plain one; `alpha` of an area;
`group` and `series`, the entries of legends that switch the trace.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from exgrpo.train.report.curves import Curve, FloatArray
from exgrpo.train.report.looks import DASHES, symbol
from exgrpo.train.report.template import readable

Trace = dict[str, Any]
DIGITS = 6
FEW_POINTS = 12
ROOM = 0.05
"""Of an axis' length beyond the values."""
LENGTHS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


@dataclass(frozen=True)
class Axis:
    """A horizontal axis.

    Attributes:
        title: below it.
        unit: of one value in a tooltip.
        scale: by which values are divided.
        last: the largest of these values, in its unit.
    """

    title: str
    unit: str
    scale: float
    last: float


def plain(text: str) -> str:
    """A text that plotly shows as it is: it would read tags and entities, and %{...} in templates."""
    return html.escape(readable(text), quote=False)


def horizontal(x: str, last: float) -> Axis:
    """The axis of a column of this name with values up to `last`; many seconds become minutes or hours."""
    if x == "seconds_so_far":
        scale, unit = next(((n, u) for n, u in LENGTHS if last > 2 * n), LENGTHS[-1])
        return Axis(f"training time in {unit}", unit, scale, last / scale)
    return Axis(x.replace("_", " "), "step" if x == "step" else x.replace("_", " "), 1.0, last)


def layout(axis: Axis | None, low: float, high: float, *, zero: bool) -> dict[str, Any]:
    """The axes of a plot with values between `low` and `high`; those of all plots have the same place."""
    if zero:
        low, high = 0.0, high if high > 0 else 1.0
    room = ROOM * (high - low) or ROOM * abs(high) or 1.0
    across: dict[str, Any] = {}
    if axis is not None:
        across = {"title": {"text": axis.title}, "range": rounded(np.array([-0.03, 1.03]) * (axis.last or 1.0))}
        across |= {"tickformat": "~s"} if axis.last >= 10_000 else {}
    ends = np.array([0.0 if zero else low - room, high + room])
    return {"xaxis": across, "yaxis": {"range": rounded(ends), "tickformat": _ticks(low, high)}}


def _ticks(low: float, high: float) -> str:
    """The format of numbers at an axis, whose room is narrow."""
    largest = max(abs(low), abs(high))
    return "~s" if largest >= 10_000 else "~e" if largest < 1e-3 else "~g"


def line_trace(
    line: Curve, name: str, axis: Axis, *, paint: str, group: int, series: int = 0, dash: int = 0, member: bool = False
) -> Trace:
    """A curve with a tooltip at each point; a `member` is one of those over which another curve is the mean."""
    few = len(line.x) <= FEW_POINTS
    interval = "" if line.low is None else "<br>95 %: %{customdata[0]:.4~g} to %{customdata[1]:.4~g}"
    at = f"{axis.unit} %{{x}}" if axis.unit == "step" else f"%{{x:.4~s}} {axis.unit}"
    trace: Trace = {
        "type": "scatter",
        "mode": "lines+markers" if symbol(group) or few else "lines",
        "name": plain(name),
        "x": rounded(line.x / axis.scale),
        "y": rounded(line.y),
        "line": {"dash": DASHES[dash % len(DASHES)], "width": 1 if member else 2},
        "marker": {"symbol": symbol(group) or "circle", "size": 3 if member else 5, "maxdisplayed": FEW_POINTS},
        "opacity": 0.45 if member else 1,
        "hovertemplate": f"<b>%{{fullData.name}}</b><br>{at}: %{{y:.4~g}}{interval}<extra></extra>",
        "meta": {"paint": paint, "group": group, "series": series},
    }
    if line.low is not None and line.high is not None:
        trace["customdata"] = [list(ends) for ends in zip(rounded(line.low), rounded(line.high), strict=True)]
    return trace


def band_trace(
    x: FloatArray, low: FloatArray, high: FloatArray, axis: Axis, *, paint: str, alpha: float, group: int, series: int
) -> Trace:
    """The area between two curves, without a tooltip."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": rounded(np.concatenate([x, x[::-1]]) / axis.scale),
        "y": rounded(np.concatenate([high, low[::-1]])),
        "fill": "toself",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "meta": {"paint": paint, "alpha": alpha, "group": group, "series": series},
    }


def area_trace(x: FloatArray, height: FloatArray, name: str, *, paint: str, series: int) -> Trace:
    """An area that stands on those before it."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": plain(name),
        "x": rounded(x),
        "y": rounded(height),
        "stackgroup": "all",
        "line": {"width": 0.5},
        "hovertemplate": "<b>%{fullData.name}</b><br>step %{x}: %{y:.4~g}<extra></extra>",
        "meta": {"paint": paint, "alpha": 0.85, "series": series},
    }


def bar_trace(edges: FloatArray, counts: FloatArray, *, paint: str) -> Trace:
    """A bar for each count, between its edges."""
    return {
        "type": "bar",
        "x": rounded((edges[:-1] + edges[1:]) / 2),
        "width": rounded(np.diff(edges)),
        "y": rounded(counts),
        "customdata": [list(ends) for ends in zip(rounded(edges[:-1]), rounded(edges[1:]), strict=True)],
        "hovertemplate": "%{customdata[0]} to %{customdata[1]}: %{y}<extra></extra>",
        "marker": {},
        "meta": {"paint": paint, "series": 0},
    }


def rounded(values: Sequence[float] | FloatArray) -> list[float | int]:
    """Values with as many digits as can be seen; whole numbers without a point."""
    return [_whole(float(f"{value:.{DIGITS}g}")) for value in values]


def _whole(value: float) -> float | int:
    return int(value) if value.is_integer() and math.fabs(value) < 1e15 else value
