"""Runs as plots: lines, and stacks of areas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from exgrpo.train.metrics.report.figures import (
    AREA_ALPHA,
    DASHES,
    Columns,
    Curve,
    FloatArray,
    Trace,
    area_trace,
    band_trace,
    colour,
    curve,
    horizontal,
    layout,
    line_trace,
    mean_curve,
    readable,
    thin,
)
from exgrpo.train.metrics.report.runs import RunColumns

INK = "var(--ink)"


@dataclass(frozen=True)
class Panel:
    """One plot of lines.

    Attributes:
        title: heading.
        unit: label of the vertical axis.
        series: column to name of each line of a run; names tell several lines apart.
        x: column of the horizontal axis.
        held_out: whether the columns are of the evaluations.
        zero: whether the vertical axis starts at 0.
        note: what a reader has to know.
        interval: the columns of the 95 % confidence interval of a single run's line.
        constant: whether the plot is drawn though it shows one number only.
    """

    title: str
    unit: str
    series: Mapping[str, str]
    x: str = "step"
    held_out: bool = False
    zero: bool = False
    note: str = ""
    interval: tuple[str, str] | None = None
    constant: bool = False


@dataclass(frozen=True, eq=False)
class PlotGroup:
    """Runs drawn as one curve, and its label."""

    label: str
    runs: Sequence[RunColumns]


@dataclass(frozen=True)
class Stack:
    """One plot of stacked areas for each group.

    Attributes:
        title: heading.
        unit: label of the vertical axis.
        prefix: of the columns.
        label: what to call a column; {0} is its name without the prefix.
        without: columns that are left out.
        total: whether to show sums since the start of the run.
        note: what a reader has to know.
    """

    title: str
    unit: str
    prefix: str
    label: str
    without: Sequence[str] = ()
    total: bool = False
    note: str = ""


@dataclass(frozen=True)
class Key:
    """An entry of a plot's legend: what it is called and looks like; it switches the traces of its series."""

    label: str
    series: int
    paint: str
    dash: str = "solid"
    alpha: float | None = None


@dataclass(frozen=True, eq=False)
class Plot:
    """A plot of a page.

    Attributes:
        name: its own in the page.
        title: heading.
        unit: of the vertical axis.
        note: what a reader has to know.
        x: the column of the horizontal axis; empty: it is another one.
        words: the plot for those who cannot see it.
        keys: its legend, where it has several curves of a run.
        curves: what it shows; none where no run has the numbers.
        figure: `data` and `layout` for plotly.js, as `figures` describes them.
        constant: whether it says something though it shows one number only.
        one_group: whether it shows one group, beside such plots of the others.
    """

    name: str
    title: str
    unit: str
    note: str = ""
    x: str = ""
    words: str = ""
    keys: tuple[Key, ...] = ()
    curves: tuple[Curve, ...] = ()
    figure: dict[str, Any] | None = None
    constant: bool = False
    one_group: bool = False


def draw_lines(panel: Panel, groups: Sequence[PlotGroup], name: str) -> Plot:
    """Every group's curves over one another; `name` is the plot's own in the page."""
    series = list(panel.series.items())
    members: list[tuple[int, int, Curve]] = []
    lines: list[tuple[int, int, Curve]] = []
    for i, group in enumerate(groups):
        runs = [run.held_out if panel.held_out else run.training for run in group.runs]
        for k, (column, _) in enumerate(series):
            if len(runs) > 1:
                members += [(i, k, thin(curve(run, panel.x, column))) for run in runs]
            lines.append((i, k, thin(mean_curve(runs, panel.x, column, panel.interval))))
    lines, members = ([each for each in drawn if len(each[2].x)] for drawn in (lines, members))
    if not lines:
        return Plot(name, panel.title, panel.unit, panel.note, panel.x)
    axis = horizontal(panel.x, max(line.x[-1] for _, _, line in (*lines, *members)))
    data: list[Trace] = []
    for i, k, line in lines:
        if line.low is not None and line.high is not None:
            paint = _paint(groups, i, k)
            data.append(band_trace(line.x, line.low, line.high, axis, paint=paint, group=i, series=k))
    for drawn, member in ((members, True), (lines, False)):
        for i, k, line in drawn:
            label = ", ".join(filter(None, (groups[i].label, series[k][1], "one seed" if member else "")))
            paint, dash = _paint(groups, i, k), k if _many(groups) else 0
            data.append(line_trace(line, label, axis, paint=paint, group=i, series=k, dash=dash, member=member))
    words = [
        f"{', '.join(filter(None, (groups[i].label, series[k][1])))}: {_in_words(line, panel.x)}"
        for i, k, line in lines
    ]
    low, high = _limits([line for _, _, line in (*lines, *members)], single=all(len(g.runs) == 1 for g in groups))
    there = sorted({k for _, k, _ in lines})
    keys = [
        Key(series[k][1], k, INK if _many(groups) else colour(k), DASHES[k % len(DASHES)] if _many(groups) else "solid")
        for k in there
    ]
    return Plot(
        name,
        panel.title,
        panel.unit,
        panel.note,
        panel.x,
        "; ".join(words),
        tuple(keys) if len(series) > 1 else (),
        tuple(line for _, _, line in lines),
        {"data": data, "layout": layout(axis, low, high, zero=panel.zero)},
        panel.constant,
    )


def _many(groups: Sequence[PlotGroup]) -> bool:
    """Whether colours tell groups apart, and dashes series; else colours tell series apart."""
    return len(groups) > 1


def _paint(groups: Sequence[PlotGroup], group: int, series: int) -> str:
    return colour(group if _many(groups) else series)


def _limits(lines: Sequence[Curve], *, single: bool) -> tuple[float, float]:
    """The range of the values. An interval over few seeds can be many times wider than that, and does not count."""
    values = [line.y for line in lines]
    if single:
        values += [end for line in lines for end in (line.low, line.high) if end is not None]
    joined = np.concatenate(values)
    return float(joined.min()), float(joined.max())


def draw_stacks(plan: Stack, groups: Sequence[PlotGroup], name: str) -> list[Plot]:
    """Stacked areas, one plot per group on one scale, as means over the group's runs."""
    names = _stacked_columns(plan, groups)
    stacks = [_stack([run.merged for run in group.runs], list(names), total=plan.total) for group in groups]
    top = max((float(heights.sum(axis=0).max()) for _, heights in stacks if heights.size), default=0.0)
    labels = list(names.values())
    plots = []
    for i, (group, (steps, heights)) in enumerate(zip(groups, stacks, strict=True)):
        title = f"{plan.title}: {group.label}" if _many(groups) else plan.title
        if not heights.any():
            plots.append(Plot(f"{name}-{i}", title, plan.unit, plan.note))
            continue
        there = [k for k in range(len(labels)) if heights[k].any()]
        last = ", ".join(f"{labels[k]} {heights[k][-1]:.3g}" for k in there)
        data = [area_trace(steps, heights[k], labels[k], paint=colour(k), series=k) for k in there]
        plots.append(
            Plot(
                f"{name}-{i}",
                title,
                plan.unit,
                plan.note,
                "step",
                f"{group.label} at step {steps[-1]:g}: {last}",
                tuple(Key(labels[k], k, colour(k), alpha=AREA_ALPHA) for k in there),
                tuple(Curve(steps, heights[k]) for k in there),
                {"data": data, "layout": layout(horizontal("step", float(steps[-1])), 0.0, top, zero=True)},
                one_group=True,
            )
        )
    return plots


def _stacked_columns(stack: Stack, groups: Sequence[PlotGroup]) -> dict[str, str]:
    """What to call each column of the stack, from the bottom up."""
    # In the order of training, whatever an evaluation before it has: a phase then has one colour in all plots.
    found = dict.fromkeys(n for group in groups for run in group.runs for n in (*run.training, *run.merged))
    names = [name for name in found if name.startswith(stack.prefix) and name not in stack.without]
    return {name: readable(stack.label.format(name.removeprefix(stack.prefix))) for name in names}


def _stack(runs: Sequence[Columns], names: Sequence[str], *, total: bool) -> tuple[FloatArray, FloatArray]:
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


def _in_words(line: Curve, x: str) -> str:
    """First and last point, and the interval at the last."""
    ends = "" if line.low is None or line.high is None else f" ({line.low[-1]:.3g} to {line.high[-1]:.3g})"
    unit = {"step": "step", "generated_tokens": "token"}.get(x, "second")
    return f"{line.y[0]:.4g} at {unit} {line.x[0]:.0f}, {line.y[-1]:.4g}{ends} at {unit} {line.x[-1]:.0f}"
