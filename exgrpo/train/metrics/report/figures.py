"""What pages are made of: curves over one or several runs, how they are told apart and drawn, and templates.

A figure is a plain dictionary for plotly.js without colours, which plots.js adds by the page's mode. What `meta` of a
trace says is for plots.js: `paint`, a colour of the style sheet or a plain one; `alpha` of an area; `group` and
`series`, the entries of legends that switch the trace.

A page stands alone, and shows whatever text it is given as text. One that has scripts names their files in `scripts`,
in the order in which they run:

    {% extends "layout.html" %}
    {% set scripts = ["theme.js", "plotly.min.js", "plots.js"] %}

`layout.html` writes them into the page, and allows these scripts, by their hashes, and no other. `plots.html` has the
elements that plots.js fills.
"""

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import BaseLoader, Environment, FileSystemLoader, StrictUndefined, Template

from exgrpo.extras import needs
from exgrpo.train.common.functions import ASSETS

FloatArray = npt.NDArray[np.float64]
Columns = dict[str, FloatArray]
"""Numbers by name, one per record, NaN where a record lacks one; "step" is always there and strictly increasing."""
Trace = dict[str, Any]
MAX_POINTS = 1000
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
# Okabe and Ito's colours, without yellow, which is lost on white; and theirs in lighter tones for a dark ground.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DARK_COLOURS = ("#4AA3F0", "#F5803E", "#2FC79A", "#E59BC4", "#A9DCFF", "#F2C14E", "#F5F5F5")
SYMBOLS = ("", "circle", "square", "triangle-up", "diamond", "triangle-down")
KEYS = ("", "●", "■", "▲", "◆", "▼")
DASHES = ("solid", "dash", "dot")
DIGITS = 6
FEW_POINTS = 12
BAND_ALPHA, AREA_ALPHA = 0.18, 0.85
ROOM = 0.05
"""Of an axis' length beyond the values."""
LENGTHS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - {*map(ord, "\t\n\r")}
_DIRECTIONS = {0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_SURROGATES = range(0xD800, 0xE000)
_NAMED = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in (*_CONTROLS, *_DIRECTIONS, *_SURROGATES)
}
"""What is shown of characters that a browser drops, that turn the order of text around, or that cannot be written."""
_ENDING = ("</script", "<!--")
"""What a browser does not read as a part of a script."""
_IN_JSON = {code: f"\\u{code:04x}" for code in map(ord, "<>&")}


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


def colour(index: int) -> str:
    """Of the index-th group, as a page's style sheet calls it."""
    return f"var(--curve-{index % len(COLOURS)})"


def symbol(index: int) -> str:
    """Of the index-th group: what tells it from an earlier one of the same colour; empty for the first ones."""
    return SYMBOLS[index // len(COLOURS) % len(SYMBOLS)]


def key(index: int) -> str:
    """The character that a legend shows for the symbol of the index-th group."""
    return KEYS[index // len(COLOURS) % len(KEYS)]


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
    x: FloatArray, low: FloatArray, high: FloatArray, axis: Axis, *, paint: str, group: int, series: int
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
        "meta": {"paint": paint, "alpha": BAND_ALPHA, "group": group, "series": series},
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
        "meta": {"paint": paint, "alpha": AREA_ALPHA, "series": series},
    }


def rounded(values: Sequence[float] | FloatArray) -> list[float | int]:
    """Values with as many digits as can be seen; whole numbers without a point."""
    return [_whole(float(f"{value:.{DIGITS}g}")) for value in values]


def _whole(value: float) -> float | int:
    return int(value) if value.is_integer() and math.fabs(value) < 1e15 else value


class _Verbatim:
    """What a template writes as it is: Jinja takes it for markup, and `_shown` leaves it alone."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __html__(self) -> str:
        return self._text


def template(path: Path) -> Template:
    """The template of a file; it may use the files of its folder, those that all pages share, and plotly.min.js."""
    loader = FileSystemLoader([path.parent, ASSETS, _plotly()])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, finalize=_shown)
    environment.globals["script"] = lambda name: _Verbatim(_script(loader, environment, name))
    environment.globals["script_hash"] = lambda name: _Verbatim(_hash(_script(loader, environment, name)))
    environment.globals["palette"] = list(zip(COLOURS, DARK_COLOURS, strict=True))
    environment.filters["json"] = lambda value: _Verbatim(as_json(value))
    return environment.get_template(path.name)


def readable(text: str) -> str:
    """A text in which characters that cannot be seen or written stand by their numbers; markup stays markup."""
    return text.translate(_NAMED)


def as_json(value: Any) -> str:
    """Plain values as JSON that stands within an element `script`: in ASCII, and without a character of markup."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_IN_JSON)


def _shown(value: Any) -> Any:
    return readable(value) if isinstance(value, str) else value


def _script(loader: BaseLoader, environment: Environment, name: str) -> str:
    """The text of a script.

    Raises:
        ValueError: it would end the element that it stands in.
    """
    text = loader.get_source(environment, name)[0]
    if any(ending in text.lower() for ending in _ENDING):
        raise ValueError(f"{name}: a script in a page cannot contain {' or '.join(_ENDING)}")
    return text


def _hash(script: str) -> str:
    """What a Content-Security-Policy calls a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _plotly() -> Path:
    """The folder of plotly.min.js; plotly itself, which takes its time, is not imported."""
    with needs(__name__, "exgrpo[train]"):
        found = find_spec("plotly")
        if found is None or found.origin is None:
            raise ModuleNotFoundError("No module named 'plotly'", name="plotly")
    return Path(found.origin).parent / "package_data"
