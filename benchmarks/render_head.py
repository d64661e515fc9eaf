"""Picture of one table of heads: `python -m benchmarks.render_head RECORD.json GROUP PICTURE.svg`.

It draws docs/policy_loss.svg from the record of the H100 and its group "policy_loss bfloat16 8192x1536x151936".
"""

import math
import sys
from pathlib import Path

import matplotlib

from benchmarks.record import Row, groups_of, read

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ROWS = {
    "exgrpo cuda": "exgrpo",
    "Cut Cross-Entropy": "Cut Cross-Entropy",
    "TRL chunked log-prob": "TRL",
    "full logits, compiled": "full logits, compiled",
    "full logits": "full logits",
    "verl Triton": "verl",
    "Liger fused linear GRPO": "Liger",
}
"""Rows of the record and their names in the picture."""
OWN, OTHER = "#0b6e4f", "#b8b8b8"
LONGEST = 3.0
"""Bars end at this multiple of the time of exgrpo; their labels have the whole number."""


def draw(path: Path, group: str, picture: Path) -> None:
    """Draw time and peak memory of the rows of a group, in the order of their times."""
    record = read(path)
    rows = {row["row"]: row for row in groups_of(record.rows)[group]}
    shown = sorted((rows[name] for name in ROWS if name in rows), key=lambda row: -row["median"])
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "exgrpo", "font.size": 9}):
        figure, (time, memory) = plt.subplots(1, 2, figsize=(9, 2.7), sharey=True, layout="constrained")
        limit = LONGEST * rows["exgrpo cuda"]["median"] * 1e3
        _bars(time, shown, [row["median"] * 1e3 for row in shown], "milliseconds, forward and backward", limit)
        _bars(memory, shown, [row["peak_bytes"] / 2**30 for row in shown], "peak memory, GiB")
        name, dtype, sizes = group.split()
        tokens, width, vocabulary = (f"{int(size):,}" for size in sizes.split("x"))
        title = f"{name.replace('_', ' ')}, {dtype}, {tokens} tokens, width {width}, vocabulary {vocabulary}"
        figure.suptitle(f"{title}: {record.machine['device']}, {record.date}", fontsize=9, x=0.01, ha="left")
        figure.savefig(picture, metadata={"Date": None})
        plt.close(figure)


def _bars(axes: Axes, rows: list[Row], values: list[float], title: str, limit: float = math.inf) -> None:
    names = [ROWS[row["row"]] for row in rows]
    colours = [OWN if name == "exgrpo" else OTHER for name in names]
    bars = axes.barh(names, [min(value, limit) for value in values], color=colours)
    axes.bar_label(bars, [f"{v:.1f}" if v <= limit else f"{v:.0f} (cut)" for v in values], padding=3)
    axes.set_title(title, loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.18)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
