"""The plots of a record: heads against the floor, scaling, the phases of a training step."""

from pathlib import Path

import matplotlib

from benchmarks.races import FLOOR
from benchmarks.record import Row, groups_of

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

SCALED = {"T": "tokens", "D": "width", "V": "vocabulary"}
ERRORS = {"log_prob_error", "gradient_error"}
"""What only rows of heads report."""
OURS, OTHERS = "#0b6e4f", "#b8b8b8"


def draw(rows: list[Row], path: Path) -> bool:
    """Draw what there is of a record into one file; returns whether there is anything."""
    groups = groups_of(rows)
    heads = [name for name, of_group in groups.items() if any(ERRORS & row.keys() for row in of_group)]
    scaling = [name for name in SCALED if any(row["group"].startswith(f"scaling of {name}") for row in rows)]
    steps = [row for row in rows if "phases" in row]
    panels = len(heads) + 2 * len(scaling) + bool(steps)
    if not panels:
        return False
    lines = -(-panels // 2)
    figure, grid = plt.subplots(lines, 2, figsize=(13, 3.4 * lines), squeeze=False, layout="constrained")
    axes = iter(grid.flat)
    for group in heads:
        _bars(next(axes), group, groups[group])
    for name in scaling:
        of_sweep = [row for row in rows if row["group"].startswith(f"scaling of {name}")]
        _lines(next(axes), of_sweep, SCALED[name], "median", "seconds")
        _lines(next(axes), of_sweep, SCALED[name], "peak_bytes", "peak bytes")
    if steps:
        _phases(next(axes), steps)
    for empty in axes:
        empty.set_axis_off()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return True


def _bars(axes: Axes, group: str, rows: list[Row]) -> None:
    rows = sorted((row for row in rows if row["row"] != FLOOR), key=lambda row: row["floor_over_time"])
    colours = [OURS if row["row"].startswith("exgrpo") else OTHERS for row in rows]
    bars = axes.barh([row["row"] for row in rows], [row["floor_over_time"] for row in rows], color=colours)
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.set_title(f"{group}: floor / time", loc="left", fontsize=9)
    axes.set_xlim(0, max(1.1, 1.1 * max(row["floor_over_time"] for row in rows)))
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


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
    names = [f"{row['group'].removeprefix('training step: ')}\n{row['row']}" for row in rows]
    left = [0.0] * len(rows)
    for phase in rows[0]["phases"]:
        widths = [row["phases"][phase] / sum(row["phases"].values()) * row.get("times_on_policy", 1.0) for row in rows]
        axes.barh(names, widths, left=left, label=phase)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_title("a training step, on-policy = 1", loc="left", fontsize=9)
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    axes.spines[["top", "right"]].set_visible(False)
