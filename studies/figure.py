"""The curves of a study in one figure: a column per task, Pass@1 above Pass@k."""

import io
from collections.abc import Sequence
from typing import Any, Literal

from exgrpo.extras import needs
from exgrpo.train.metrics.report.page import COLOURS
from exgrpo.train.metrics.report.runs import mean_curve
from studies.findings import Findings

with needs(__name__, "exgrpo[bench]"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

WIDTH, HEIGHT, LEGEND = 3.6, 2.4, 0.45
"""Size in inches of a plot, and height of the legend."""
LOOKS = ("o-", "s--", "^:", "D-.")
"""Marker and line style of the arms: the next one each time the colours are used up."""
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
ROWS: tuple[Literal["pass_at_1", "pass_at_k"], ...] = ("pass_at_1", "pass_at_k")


def figure(findings: Findings, rows: Sequence[str] = ROWS) -> str:
    """Return an SVG of held-out scores by generated tokens: means over seeds with 95 % intervals (Student's t)."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": findings.study.name}):
        tasks = findings.tasks
        size = (WIDTH * len(tasks), HEIGHT * len(rows) + LEGEND)
        drawn = Figure(figsize=size, layout="constrained")
        plots = drawn.subplots(len(rows), len(tasks), squeeze=False, sharex="col")
        for row, name in enumerate(rows):
            for column, task in enumerate(tasks):
                _draw(plots[row][column], findings, task, name)
            plots[row][0].set_ylabel(findings.score_name(name))
        for column, task in enumerate(tasks):
            plots[0][column].set_title(task, loc="left", fontsize=10)
            plots[-1][column].set_xlabel("generated tokens")
            plots[-1][column].xaxis.set_major_formatter(EngFormatter(sep=""))
        handles, labels = plots[0][0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside upper left", ncols=max(1, round(size[0] / 1.8)))
        buffer = io.StringIO()
        # Without metadata, which has the time, equal results give equal files.
        drawn.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        return buffer.getvalue()


def _draw(plot: Axes, findings: Findings, task: str, name: str) -> None:
    runs = [[dict(run.curves) for run in arm.runs[task]] for arm in findings.arms]
    lines = [mean_curve(of_arm, "generated_tokens", name) for of_arm in runs]
    for number, (arm, line) in enumerate(zip(findings.arms, lines, strict=True)):
        look = LOOKS[number // len(COLOURS) % len(LOOKS)]
        plot.plot(line.x, line.y, look, label=arm.name, color=_colour(number), markersize=3, linewidth=1.6)
    # An interval over few seeds can be many times wider than the curves: it must not set the scale.
    plot.autoscale_view()
    plot.set_autoscale_on(False)
    for number, line in enumerate(lines):
        if line.low is not None and line.high is not None:
            plot.fill_between(line.x, line.low, line.high, color=_colour(number), alpha=0.15, linewidth=0)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
