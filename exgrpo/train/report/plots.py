"""The plots of a report: which there are, how runs become curves, and how curves become SVG."""

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import yaml
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from exgrpo.train.report.curves import Columns, Curve, FloatArray, curve, mean_curve, thin
from exgrpo.train.report.panels import Panel, source_panels, variety_panels
from exgrpo.train.report.runs import RunColumns
from exgrpo.train.report.template import readable

ASSETS = Path(__file__).parents[1] / "assets" / "report"
# Okabe and Ito's colours for all kinds of colour vision, without yellow, which is lost on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("", "o", "s", "^", "D", "v")
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)))
FEW_POINTS = 12
MAX_KEYS = 8
HISTOGRAM_BINS = 40
# Quantiles between which a band of a fan lies, what to call it, and how opaque it is.
BANDS = (("q01", "q99", "1 to 99 %", 0.12), ("q10", "q90", "10 to 90 %", 0.25))
SIZE = (4.3, 2.7)
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a939c",
    "axes.grid": True,
    "grid.color": "#e4e7eb",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "text.parse_math": False,
    "legend.frameon": False,
}


@dataclass(frozen=True, eq=False)
class PlotGroup:
    """Runs drawn as one curve, and its label."""

    label: str
    runs: Sequence[RunColumns]


@dataclass(frozen=True)
class Fan:
    """One plot of a distribution over steps: its median, and bands between quantiles.

    Attributes:
        title: heading.
        unit: label of the vertical axis.
        prefix: of the columns q01, q10, q50, q90 and q99.
        note: what a reader has to know.
    """

    title: str
    unit: str
    prefix: str
    note: str = ""


@dataclass(frozen=True)
class Stack:
    """One plot of stacked areas for each group.

    Attributes:
        title: heading.
        unit: label of the vertical axis.
        prefix: of the columns.
        label: what to call a column; {0} is its name without the prefix.
        without: columns that are left out.
        graded: whether columns are numbered and colours should show their order.
        total: whether to show sums since the start of the run.
        note: what a reader has to know.
    """

    title: str
    unit: str
    prefix: str
    label: str
    without: Sequence[str] = ()
    graded: bool = False
    total: bool = False
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """A drawn plot; `svg` is empty where no run has the numbers."""

    title: str
    note: str
    svg: str


@dataclass(frozen=True)
class Section:
    """Plots that answer one question."""

    title: str
    text: str
    pictures: list[Picture]


def colour(index: int) -> str:
    """Of the index-th group."""
    return COLOURS[index % len(COLOURS)]


def marker(index: int) -> str:
    """Of the index-th group: what tells it from an earlier one of the same colour."""
    return MARKERS[index // len(COLOURS) % len(MARKERS)]


def sections(groups: Sequence[PlotGroup]) -> list[Section]:
    """All plots of a report, as assets/report/plots.yaml lists them."""
    result = []
    every = [run for group in groups for run in group.runs]
    for number, plan in enumerate(yaml.safe_load((ASSETS / "plots.yaml").read_text(encoding="utf-8"))):
        panels = [Panel(**panel) for panel in plan["panels"]]
        if plan.get("sources"):
            panels += source_panels(every)
        if plan.get("variety"):
            panels += variety_panels(every)
        pictures = [draw_lines(panel, groups, f"plot-{number}-{i}") for i, panel in enumerate(panels)]
        for i, fan in enumerate(plan.get("fans", [])):
            pictures.append(draw_fan(Fan(**fan), groups, f"fan-{number}-{i}"))
        for i, stack in enumerate(plan.get("stacks", [])):
            pictures += draw_stacks(Stack(**stack), groups, f"stack-{number}-{i}")
        result.append(Section(plan["title"], plan["text"], pictures))
    return result


def _stacked_columns(stack: Stack, groups: Sequence[PlotGroup]) -> dict[str, str]:
    """What to call each column of the stack, from the bottom up."""
    # In the order of training, whatever an evaluation before it has: a phase then has one colour in all plots.
    found = dict.fromkeys(n for group in groups for run in group.runs for n in (*run.training, *run.merged))
    names = [name for name in found if name.startswith(stack.prefix) and name not in stack.without]
    keys = [name.removeprefix(stack.prefix) for name in names]
    if stack.graded:
        keys = [str(key) for key in sorted(int(key) for key in keys if key.isdecimal())]
    return {f"{stack.prefix}{key}": readable(stack.label.format(key)) for key in keys}


def draw_lines(panel: Panel, groups: Sequence[PlotGroup], name: str) -> Picture:
    """Every group's curves over one another; `name` is the plot's own in the page."""
    with mpl.rc_context(STYLE):
        figure, axes = _canvas(panel.unit, bottom=0.16)
        descriptions = []
        for i, group in enumerate(groups):
            runs = [run.held_out if panel.held_out else run.training for run in group.runs]
            for (column, label), dash in zip(panel.series.items(), DASHES, strict=False):
                line = thin(mean_curve(runs, panel.x, column))
                if len(runs) > 1:
                    for run in runs:
                        _line(axes, thin(curve(run, panel.x, column)), i, dash, linewidth=0.6, alpha=0.4)
                if len(line.x):
                    _line(axes, line, i, dash, linewidth=1.6)
                    descriptions.append(f"{group.label}{', ' if label else ''}{label}: {_in_words(line, panel.x)}")
        if not axes.lines:
            return Picture(panel.title, panel.note, "")
        _horizontal_axis(axes, panel.x)
        if panel.zero:
            _from_zero(axes, 1.05 * axes.dataLim.y1)
        if len(panel.series) > 1:
            handles = [
                Line2D([], [], color="#333", linestyle=dash, label=label)
                for (_, label), dash in zip(panel.series.items(), DASHES, strict=False)
            ]
            figure.legend(handles=handles, loc="upper right", ncols=3, handlelength=2, columnspacing=1.2)
        return Picture(panel.title, panel.note, _svg(figure, name, panel.title, "; ".join(descriptions)))


def _line(axes: Axes, line: Curve, index: int, dash: Any, *, linewidth: float, alpha: float = 1.0) -> None:
    few = len(line.x) <= FEW_POINTS
    axes.plot(
        line.x,
        line.y,
        color=colour(index),
        linestyle=dash,
        linewidth=linewidth,
        alpha=alpha,
        marker=marker(index) or ("o" if few else ""),
        markersize=3.5,
        markevery=max(1, len(line.x) // FEW_POINTS),
    )
    if line.half is not None:
        # The interval over few seeds can be many times wider than what there is to see: it does not set the scale.
        limits = axes.dataLim.frozen()
        axes.fill_between(line.x, line.y - line.half, line.y + line.half, color=colour(index), alpha=0.18, linewidth=0)
        axes.dataLim.set(limits)


def draw_fan(fan: Fan, groups: Sequence[PlotGroup], name: str) -> Picture:
    """Every group's median over its bands, as means over the group's runs; `name` is the plot's own in the page."""
    with mpl.rc_context(STYLE):
        figure, axes = _canvas(fan.unit, bottom=0.16)
        descriptions = []
        for i, group in enumerate(groups):
            runs = [run.training for run in group.runs]
            median = thin(mean_curve(runs, "step", f"{fan.prefix}q50"))
            if not len(median.x):
                continue
            _line(axes, Curve(median.x, median.y), i, "-", linewidth=1.6)
            descriptions.append(f"{group.label}, median: {_in_words(median, 'step')}")
            for low, high, label, alpha in BANDS:
                bottom, top = (thin(mean_curve(runs, "step", f"{fan.prefix}{q}")).y for q in (low, high))
                axes.fill_between(median.x, bottom, top, color=colour(i), alpha=alpha, linewidth=0)
                descriptions.append(f"{label} at step {median.x[-1]:.0f}: {bottom[-1]:.3g} to {top[-1]:.3g}")
        if not descriptions:
            return Picture(fan.title, fan.note, "")
        _horizontal_axis(axes, "step")
        handles: list[Artist] = [Line2D([], [], color="#333", label="median")]
        handles += [
            Patch(color="#333", alpha=alpha, linewidth=0, label=label) for _, _, label, alpha in reversed(BANDS)
        ]
        figure.legend(handles=handles, loc="upper right", ncols=3, handlelength=1.2, columnspacing=1.2)
        return Picture(fan.title, fan.note, _svg(figure, name, fan.title, "; ".join(descriptions)))


def draw_stacks(plan: Stack, groups: Sequence[PlotGroup], prefix: str) -> list[Picture]:
    """Stacked areas, one plot per group on one scale, as means over the group's runs; `prefix` names them."""
    names = _stacked_columns(plan, groups)
    stacks = [_stack([run.merged for run in group.runs], names, total=plan.total) for group in groups]
    top = max((float(heights.sum(axis=0).max()) for _, heights in stacks if heights.size), default=0.0)
    pictures = []
    for i, (group, (steps, heights)) in enumerate(zip(groups, stacks, strict=True)):
        full_title = f"{plan.title}: {group.label}" if len(groups) > 1 else plan.title
        if not heights.any():
            pictures.append(Picture(full_title, plan.note, ""))
            continue
        last = ", ".join(f"{label} {height:.3g}" for label, height in zip(names.values(), heights[:, -1], strict=True))
        with mpl.rc_context(STYLE):
            figure, axes = _canvas(plan.unit, bottom=0.34)
            shades = mpl.colormaps["cividis"](np.linspace(0, 1, len(names))) if plan.graded else COLOURS
            colours = [shades[k % len(shades)] for k in range(len(names))]
            areas = axes.stackplot(steps, heights, colors=colours, labels=list(names.values()), linewidth=0)
            _horizontal_axis(axes, "step")
            _from_zero(axes, 1.05 * top)
            shown = areas[:: math.ceil(len(areas) / MAX_KEYS)]
            figure.legend(handles=shown, loc="lower center", ncols=4, handlelength=1, columnspacing=1)
            svg = _svg(figure, f"{prefix}-{i}", full_title, f"{group.label} at step {steps[-1]:g}: {last}")
        pictures.append(Picture(full_title, plan.note, svg))
    return pictures


def draw_histogram(title: str, values: FloatArray, name: str) -> Picture:
    """How [N] values, at least one, are distributed; `name` is the plot's own in the page."""
    with mpl.rc_context(STYLE):
        figure, axes = _canvas("number", bottom=0.12)
        axes.hist(values, bins=min(HISTOGRAM_BINS, max(1, len(np.unique(values)))), color=colour(0))
        low, middle, high = np.quantile(values, (0.0, 0.5, 1.0))
        text = f"{len(values)} values from {low:.4g} to {high:.4g}, median {middle:.4g}"
        return Picture(title, "", _svg(figure, name, title, text))


def _stack(
    runs: Sequence[Columns], names: Sequence[str] | dict[str, str], *, total: bool
) -> tuple[FloatArray, FloatArray]:
    """Steps, and the heights of the areas over them; a phase that a step did not have took no time."""
    filled = []
    for run in runs:
        columns = np.array([run.get(name, np.full(len(run["step"]), np.nan)) for name in names])
        there = np.isfinite(columns).any(axis=0)
        heights = np.nan_to_num(columns[:, there])
        heights = heights.cumsum(axis=1) if total else heights
        filled.append({"step": run["step"][there], **dict(zip(names, heights, strict=True))})
    lines = [thin(mean_curve(filled, "step", name)) for name in names]
    if not lines or not len(lines[0].x):
        return np.empty(0), np.empty((0, 0))
    steps, heights = lines[0].x, np.array([line.y for line in lines])
    # An area needs two points.
    return (steps, heights) if len(steps) > 1 else (np.array([steps[0], steps[0] + 1]), np.repeat(heights, 2, axis=1))


def _canvas(unit: str, *, bottom: float) -> tuple[Figure, Axes]:
    """Axes at a fixed place, so that those of all plots are aligned; the unit stands above them."""
    figure = Figure(figsize=SIZE)
    axes = figure.add_axes((0.13, bottom, 0.85, 0.9 - bottom))
    axes.set_title(unit, loc="left", fontsize=9, color="#56606b")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.6g}")
    return figure, axes


def _horizontal_axis(axes: Axes, x: str) -> None:
    last = axes.dataLim.x1
    locator = MaxNLocator(6, integer=x == "step", steps=[1, 2, 5, 10])
    axes.xaxis.set_major_locator(locator)
    axes.set_xlabel(x.replace("_", " "))
    if x == "generated_tokens":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    elif x == "seconds_so_far":
        length, unit = next(((n, u) for n, u in ((3600, "hours"), (60, "minutes")) if last > 2 * n), (1, "seconds"))
        ticks = [tick for tick in locator.tick_values(0, last / length) if tick * length <= 1.02 * last]
        axes.set_xticks([tick * length for tick in ticks], [f"{tick:g}" for tick in ticks])
        axes.set_xlabel(f"training time in {unit}")
    if last > 0:
        axes.set_xlim(-0.03 * last, 1.03 * last)


def _from_zero(axes: Axes, top: float) -> None:
    axes.set_ylim(0, top if axes.dataLim.y1 > 0 else 1)


def _in_words(line: Curve, x: str) -> str:
    """First and last point, and the interval at the last."""
    half = "" if line.half is None else f" ± {line.half[-1]:.3g}"
    unit = {"step": "step", "generated_tokens": "token"}.get(x, "second")
    return f"{line.y[0]:.4g} at {unit} {line.x[0]:.0f}, {line.y[-1]:.4g}{half} at {unit} {line.x[-1]:.0f}"


def _svg(figure: Figure, name: str, title: str, text: str) -> str:
    """The figure as an element of a page, with names of its own and words for those who cannot see it."""
    buffer = io.StringIO()
    # Without metadata, which names the time of drawing, equal runs give equal pages.
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata=nothing, transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    named = f'<svg role="img" aria-labelledby="{name}-title {name}-text"'
    words = f'<title id="{name}-title">{html.escape(title)}</title><desc id="{name}-text">{html.escape(text)}</desc>'
    opening, rest = svg.split(">", 1)
    return f"{opening.replace('<svg', named, 1)}>{words}{rest}"
