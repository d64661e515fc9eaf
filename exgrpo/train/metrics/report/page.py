"""Write a self-contained HTML page about runs: summary, plots of metrics.jsonl, samples of answers."""

import html
import os
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import chain, product
from pathlib import Path

import numpy as np
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from exgrpo.train.common.durable import write_whole
from exgrpo.train.common.errors import ReportError, cut, os_errors_as, printable
from exgrpo.train.common.functions import ASSETS
from exgrpo.train.metrics.report.runs import (
    HEADINGS,
    Groups,
    differences,
    group_runs,
    load_run,
    mean_curve,
    result,
    summary,
)

FOLDER = ASSETS / "report"
# Okabe and Ito's colours, without yellow, which is hard to see on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
LAYOUT = {"template": "none", "height": 340, "margin": {"l": 20, "r": 10, "t": 40, "b": 20}}
LEGEND = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"}


def write_report(folders: Sequence[Path], output: Path) -> None:
    """Write one self-contained HTML page about the runs in these folders; it replaces an older one.

    Raises:
        ReportError: a folder holds no readable metrics, or the page cannot be written.
    """
    if output.suffix.lower() not in (".html", ".htm"):
        raise ReportError(f"{output}: a report is an HTML page; choose a name that ends in .html")
    found = list(dict.fromkeys(folder.resolve() for folder in folders))
    shared = os.path.commonpath([folder.parent for folder in found])
    runs = [load_run(folder, str(folder.relative_to(shared))) for folder in found]
    groups = group_runs(runs)
    drawn, plotly = sections(groups), get_plotlyjs()
    scripts = [plotly, *re.findall("<script>(.*?)</script>", "".join(chain(*drawn.values())), re.DOTALL)]
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined)
    environment.filters["cut"] = cut
    # Escape invisible characters and those that reverse the direction of text, as \x1b.
    environment.finalize = lambda value: printable(value) if type(value) is str else value
    page = environment.get_template("page.html").render(
        runs=runs,
        result=result(groups),
        tables=[
            (["Run", *HEADINGS], [row for group in groups.items() for row in summary(*group)]),
            (["Options that differ", *groups], differences(groups)),
        ],
        sections=drawn,
        plotly=plotly,
        hashes=[b64encode(sha256(script.encode()).digest()).decode() for script in scripts],
    )
    with os_errors_as(ReportError, f"{output} cannot be written"):
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, page.encode())


def sections(groups: Groups) -> dict[str, list[str]]:
    """Draw panels.yaml: HTML of its plots by section, without plots that would be empty."""
    plan = yaml.safe_load((FOLDER / "panels.yaml").read_text(encoding="utf-8"))
    options = {"config": {"displayModeBar": False}, "full_html": False, "include_plotlyjs": False, "validate": False}
    drawn = {title: [draw(groups, **panel) for panel in panels] for title, panels in plan.items()}
    return {title: [one.to_html(**options) for one in figures if one.data] for title, figures in drawn.items()}


def draw(groups: Groups, title: str, unit: str, series: Mapping[str, str], x: str = "step") -> Figure:
    """Plot columns of runs against the column `x`; without numbers, the figure has no data.

    Several groups have a colour each and their series a dash each; the series of a single group have the colours.
    `series` has labels by regular expressions of columns; {} in a label is the group of its expression.
    """
    axes = {"xaxis": {"title": x.replace("_", " "), "automargin": True}, "yaxis": {"title": unit, "automargin": True}}
    figure = Figure(layout={**LAYOUT, **axes, "title": title, "legend": LEGEND, "hoverlabel": {"namelength": -1}})
    names = dict.fromkeys(name for runs in groups.values() for run in runs for name in run.columns)
    found = [(name, re.fullmatch(key, name), label) for key, label in series.items() for name in names]
    lines = [(name, label.format(*match.groups())) for name, match, label in found if match]
    many = len(groups) > 1
    for (i, (group, runs)), (k, (name, label)) in product(enumerate(groups.items()), enumerate(lines)):
        stem = re.sub("^test/", "held_out/", name.removesuffix("pass_rate"))
        curve = mean_curve([run.columns for run in runs], x, name, (f"{stem}low", f"{stem}high"))
        text = ", ".join(filter(None, (group, label))) if many else label or group
        colour, dash = (i, k) if many else (k, k // len(COLOURS))
        line = {"color": COLOURS[colour % len(COLOURS)], "dash": DASHES[dash % len(DASHES)]}
        look = {"name": html.escape(printable(text), quote=False), "legendgroup": colour}  # plotly reads markup
        if curve.low is not None and curve.high is not None:
            area = {"x": [*curve.x, *curve.x[::-1]], "y": [*curve.high, *curve.low[::-1]], "fill": "toself"}
            quiet = {"mode": "lines", "line": {**line, "width": 0}, "hoverinfo": "skip", "showlegend": False}
            figure.add_scatter(**area, **look, **quiet, opacity=0.3)
        if len(curve.x):
            mode, entry = "lines" if len(curve.x) > 1 else "markers", not (i and k)
            figure.add_scatter(x=curve.x, y=curve.y, **look, line=line, mode=mode, showlegend=entry)
    if any(len(runs) > 1 for runs in groups.values()) and figure.data:
        # Scale by the lines: an interval over few seeds can be many times wider.
        heights = np.concatenate([trace.y for trace in figure.data if trace.fill is None])
        room = 0.05 * np.ptp(heights) or 0.05 * abs(heights[0]) or 1
        figure.update_yaxes(range=[heights.min() - room, heights.max() + room])
    return figure
