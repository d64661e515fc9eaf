"""The curves of a study in one picture: a column for each task, Pass@1 above Pass@k."""

import io

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from exgrpo.train.report.curves import mean_curve
from exgrpo.train.report.plots import STYLE, colour, marker
from studies.findings import Findings

WIDTH, HEIGHT, LEGEND = 3.6, 2.4, 0.45
"""Inches of a plot, and of the line with the names of the arms."""
ROWS = ("pass_at_1", "pass_at_k")


def figure(findings: Findings, cost: str = "generated_tokens") -> str:
    """An SVG file: held-out scores against a cost, as means over seeds with 95 % intervals (Student's t)."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": findings.study.name}):
        tasks = findings.tasks
        size = (WIDTH * len(tasks), HEIGHT * len(ROWS) + LEGEND)
        drawn = Figure(figsize=size, layout="constrained")
        plots = drawn.subplots(len(ROWS), len(tasks), squeeze=False, sharex="col")
        for row, name in enumerate(ROWS):
            for column, task in enumerate(tasks):
                _draw(plots[row][column], findings, task, name, cost)
            plots[row][0].set_ylabel(findings.score_name(name))
        for column, task in enumerate(tasks):
            plots[0][column].set_title(task, loc="left", fontsize=10)
            plots[-1][column].set_xlabel(cost.replace("_", " "))
            plots[-1][column].xaxis.set_major_formatter(EngFormatter(sep=""))
        handles, labels = plots[0][0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside upper left", ncols=max(1, round(size[0] / 1.8)))
        buffer = io.StringIO()
        # Without metadata, which names the time of drawing, equal results give equal files.
        drawn.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        return buffer.getvalue()


def _draw(plot: Axes, findings: Findings, task: str, name: str, cost: str) -> None:
    lines = [mean_curve([dict(run.curves) for run in arm.runs[task]], cost, name) for arm in findings.arms]
    for number, (arm, line) in enumerate(zip(findings.arms, lines, strict=True)):
        shape = marker(number) or "o"
        plot.plot(line.x, line.y, label=arm.name, color=colour(number), marker=shape, markersize=3, linewidth=1.6)
    # An interval over few seeds can be many times wider than what there is to see: it does not set the scale.
    plot.autoscale_view()
    plot.set_autoscale_on(False)
    for number, line in enumerate(lines):
        if line.half is not None:
            plot.fill_between(
                line.x, line.y - line.half, line.y + line.half, color=colour(number), alpha=0.15, linewidth=0
            )
