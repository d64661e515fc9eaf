"""Plots of a record: heads against the floor, scaling, and phases and memory of a training step."""

from pathlib import Path

import matplotlib

from benchmarks.heads import FLOOR
from benchmarks.measure import bars
from benchmarks.record import Row, groups_of

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

SCALED = {"T": "tokens", "D": "width", "V": "vocabulary"}
ERRORS = {"log_prob_error", "gradient_error"}
"""Fields of rows of heads only."""
OURS, OTHERS = "#0b6e4f", "#b8b8b8"


def draw(rows: list[Row], path: Path) -> bool:
    """Draw all plots of a record into one file; return False if there are none."""
    groups = groups_of(rows)
    heads = [name for name, of_group in groups.items() if any(ERRORS & row.keys() for row in of_group)]
    scaling = [name for name in SCALED if any(row["group"].startswith(f"scaling of {name}") for row in rows)]
    steps = [row for row in rows if "phases" in row]
    memory = [row for row in steps if row.get("peak_bytes")]
    panels = len(heads) + 2 * len(scaling) + bool(steps) + bool(memory)
    if not panels:
        return False
    lines = -(-panels // 2)
    figure, grid = plt.subplots(lines, 2, figsize=(13, 3.4 * lines), squeeze=False, layout="constrained")
    axes = iter(grid.flat)
    for group in heads:
        bars(next(axes), group, groups[group])
    for name in scaling:
        of_sweep = [row for row in rows if row["group"].startswith(f"scaling of {name}")]
        _lines(next(axes), of_sweep, SCALED[name], "median", "seconds")
        _lines(next(axes), of_sweep, SCALED[name], "peak_bytes", "peak bytes")
    if steps:
        _phases(next(axes), steps)
    if memory:
        _memory(next(axes), memory)
    for empty in axes:
        empty.set_axis_off()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return True


def _lines(axes: Axes, rows: list[Row], along: str, key: str, label: str) -> None:
    for name in dict.fromkeys(row["row"] for row in rows):
        points = sorted((row[along], row[key]) for row in rows if row["row"] == name)
        colour = OURS if name.startswith("exgrpo") else "black" if name == FLOOR else OTHERS
        axes.loglog(*zip(*points, strict=True), marker="o", color=colour, label=name)
    axes.set_title(f"{label} by {along}", loc="left", fontsize=9)
    values = sorted({row[along] for row in rows})
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.minorticks_off()
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _phases(axes: Axes, rows: list[Row]) -> None:
    """Draw bars of the step's time relative to TRL, or to an on-policy step if TRL did not run."""
    peer = any("times_trl" in row for row in rows)
    names = _names(rows)
    left = [0.0] * len(rows)
    times = [row["times_trl"][0] if peer and "times_trl" in row else row.get("times_on_policy", 1.0) for row in rows]
    for phase in dict.fromkeys(phase for row in rows for phase in row["phases"]):
        widths = [
            row["phases"].get(phase, 0.0) / sum(row["phases"].values()) * of_row
            for row, of_row in zip(rows, times, strict=True)
        ]
        axes.barh(names, widths, left=left, label=phase)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_title(f"a training step, {'TRL' if peer else 'on-policy'} = 1", loc="left", fontsize=9)
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    axes.spines[["top", "right"]].set_visible(False)


def _memory(axes: Axes, rows: list[Row]) -> None:
    colours = [OTHERS if row["row"] == "trl" else OURS for row in rows]
    bars = axes.barh(_names(rows), [row["peak_bytes"] / 2**20 for row in rows], color=colours)
    axes.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
    axes.set_title("a training step: peak MiB of the processes", loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _names(rows: list[Row]) -> list[str]:
    return [f"{row['group'].removeprefix('training step: ')}\n{row['row']}" for row in rows]
