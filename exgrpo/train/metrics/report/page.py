"""One self-contained HTML page about one or several runs: a summary, plots of what metrics.jsonl holds, and samples.

Runs whose configurations differ in nothing but seed and output are drawn as one, with their mean and a 95 % confidence
interval.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from exgrpo.train.common.errors import ReportError
from exgrpo.train.common.functions import ASSETS
from exgrpo.train.metrics.report.draw import Panel, Plot, PlotGroup, Stack, draw_lines, draw_stacks
from exgrpo.train.metrics.report.figures import MAX_POINTS, Columns, as_json, colour, key, readable, rounded, template
from exgrpo.train.metrics.report.runs import (
    HEADINGS,
    RunColumns,
    RunData,
    RunGroup,
    differences,
    group_runs,
    load_run,
    result,
    summary_rows,
)
from exgrpo.train.metrics.samples import Sample

FOLDER = ASSETS / "report"
MAX_LINES = 8
RESULT = "Held-out Pass@1 against generated tokens"
"""The plot in plots.yaml that stands beside the result of several runs."""
PASS_RATE = "/pass_rate"
"""Ends the name of Pass@1 of a set of held-out questions."""
MOST_BYTES = 5_000_000
"""Of the samples of all runs in a page."""
SUCCESS = 1.0
"""`reward.success` of a run whose configuration does not say it."""


def write_report(runs: Sequence[Path], output: Path) -> None:
    """Write one self-contained HTML page about the runs in these folders.

    Args:
        runs: folders with metrics.jsonl and, for grouping over seeds, config.yaml.
        output: the page, a file that ends in .html; it replaces an older one.

    Raises:
        ReportError: where a folder holds no readable metrics, or the page cannot be written.
    """
    if output.suffix.lower() not in (".html", ".htm"):
        raise ReportError(f"{output}: a report is an HTML page; choose a name that ends in .html")
    page = page_about([load_run(folder, name) for folder, name in named(runs).items()])
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(output)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise ReportError(f"{output} cannot be written: {error.strerror}") from error


def named(runs: Sequence[Path]) -> dict[Path, str]:
    """The folders of runs, each once, with the shortest ends of their paths that tell them apart.

    Raises:
        ReportError: there are none.
    """
    folders = list(dict.fromkeys(Path(run).resolve() for run in runs))
    if not folders:
        raise ReportError("no run to report on: name at least one run's folder")
    for length in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return dict(zip(folders, names, strict=True))


def page_about(data: Sequence[RunData], *, version: str = "", waiting: Sequence[str] = ()) -> str:
    """The page about these runs.

    Args:
        data: what their folders tell.
        version: of a page that follows its runs: what the program tells of the state that it shows; empty: it does not.
        waiting: a line for each run of which there is nothing to show.
    """
    groups = group_runs(data)
    runs = [run for group in groups for run in group.runs]
    title = f"ExGRPO report: {runs[0].name}" if len(runs) == 1 else f"ExGRPO report: {len(runs)} runs"
    said = result(groups)
    shown = sections([PlotGroup(group.label, [run.columns for run in group.runs]) for group in groups])
    return template(FOLDER / "page.html").render(
        title=title if runs else "ExGRPO report",
        followed=bool(version),
        version=version,
        result=said,
        first=_taken(shown, RESULT) if said else [],
        headings=HEADINGS,
        rows=[row for i, group in enumerate(groups) for row in summary_rows(i, group)],
        notes=_notes(groups),
        warnings=[*waiting, *_damage(runs)],
        looks=[{"label": group.label, "colour": colour(i), "marker": key(i)} for i, group in enumerate(groups)],
        sections=shown,
        differences=differences(groups),
        samples=shown_samples(runs),
        configurations={run.name: yaml.safe_dump(run.config, sort_keys=False) for run in runs if run.config},
    )


def _taken(sections: Sequence["Section"], title: str) -> list[Plot]:
    """The plots of this title, which their sections then have no more."""
    found = [(section, plot) for section in sections for plot in section.plots if plot.title == title]
    for section, plot in found:
        section.plots.remove(plot)
    return [plot for _, plot in found]


def _damage(runs: Sequence[RunData]) -> list[str]:
    return [
        f"{run.name}: unreadable lines of metrics.jsonl left out: {_lines(run.unreadable)}"
        for run in runs
        if run.unreadable
    ]


def _lines(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:MAX_LINES])) + (", ..." if len(numbers) > MAX_LINES else "")
    return f"{len(numbers)} (line {shown})"


def _notes(groups: Sequence[RunGroup]) -> list[str]:
    """What a reader has to know about the table and all plots."""
    if not groups:
        return []
    notes = ["Replayed per question: replayed answers, divided by the questions that were asked."]
    if any(len(group.runs) == 1 and "held_out/low" in group.runs[0].columns.held_out for group in groups):
        notes.append(
            "The band around the held-out Pass@1 of a single run is its 95 % interval over the held-out questions "
            "(Wilson's, docs/metrics.md): how far another draw of as many questions may be from it, not another seed."
        )
    if any(len(group.runs) > 1 for group in groups):
        notes.append(
            "Runs that differ in nothing but the seed are one curve: thick lines are means over seeds, bands and ± are "
            "95 % confidence intervals of the mean (Student's t), thin lines are the single seeds. A mean is taken at "
            "steps which every seed has reached."
        )
    if any(len(run.columns.training["step"]) > MAX_POINTS for group in groups for run in group.runs):
        notes.append(f"Lines of more than {MAX_POINTS:,} points are drawn as means over equally many neighbours.")
    return notes


@dataclass(frozen=True)
class Section:
    """Plots that answer one question.

    Attributes:
        number: of the section in plots.yaml.
        title: the question.
        text: how to read the plots.
        plots: those that say something.
        left_out: the titles of the others, by the reason.
    """

    number: int
    title: str
    text: str
    plots: list[Plot]
    left_out: dict[str, list[str]]


def sections(groups: Sequence[PlotGroup]) -> list[Section]:
    """The plots of a report as assets/report/plots.yaml lists them; without sections in which no plot says anything."""
    result = []
    for number, plan in enumerate(yaml.safe_load((FOLDER / "plots.yaml").read_text(encoding="utf-8"))):
        telling: list[Plot] = []
        left_out: dict[str, list[str]] = {}
        for plot in _planned(plan, groups, number):
            if reason := _says_nothing(plot, telling):
                left_out.setdefault(reason, []).append(plot.title)
            else:
                telling.append(plot)
        if telling:
            result.append(Section(number, plan["title"], plan["text"], telling, left_out))
    return result


def _planned(plan: dict[str, Any], groups: Sequence[PlotGroup], number: int) -> list[Plot]:
    """All plots of a section; their names stay the same while a run goes on."""
    every = [run for group in groups for run in group.runs]
    panels = [Panel(**panel) for panel in plan["panels"]]
    if plan.get("sources"):
        panels += _source_panels(every)
    if plan.get("variety"):
        panels += _variety_panels(every)
    plots = [draw_lines(panel, groups, f"plot-{number}-{i}") for i, panel in enumerate(panels)]
    for i, stack in enumerate(plan.get("stacks", [])):
        plots += draw_stacks(Stack(**stack), groups, f"stack-{number}-{i}")
    return plots


def _source_panels(runs: Sequence[RunColumns]) -> list[Panel]:
    """Held-out results by set, and rewards in training and held-out results by source of data, if there are several."""
    sets = sorted({n for run in runs for n in run.held_out if n.endswith(PASS_RATE)} - {"test/pass_rate"})
    panels = [_set_panel(name.removesuffix(PASS_RATE)) for name in sets]
    tested = {name for run in runs for name in run.held_out if name.startswith("test/")} - {"test/pass_rate"}
    trained = {name for run in runs for name in run.training if name.startswith("reward/")}
    panels += [
        Panel(f"Held-out {_source(n)}", "Pass@1", {n: ""}, held_out=True, constant=True) for n in _several(tested)
    ]
    return panels + [
        Panel(f"Reward in training: {_source(n)}", "reward", {n: ""}, constant=True) for n in _several(trained)
    ]


def _set_panel(name: str) -> Panel:
    ends = (f"{name}/low", f"{name}/high")
    series = {f"{name}{PASS_RATE}": ""}
    return Panel(f"Held-out set {name}", "Pass@1", series, held_out=True, interval=ends, constant=True)


def _variety_panels(runs: Sequence[RunColumns]) -> list[Panel]:
    """What several answers to a held-out question reach together, where they are measured: at each run's largest k."""
    ks = sorted({k for run in runs if (k := max(_ks(run.held_out), default=0))})
    pass_at = [Panel(f"Held-out Pass@{k}", f"Pass@{k}", {f"pass_at/{k}": ""}, held_out=True, constant=True) for k in ks]
    return pass_at + [
        Panel(f"Different right answers among {k}", "solutions", {f"distinct_at/{k}": ""}, held_out=True, zero=True)
        for k in ks
    ]


def _ks(run: Columns) -> list[int]:
    keys = (name.removeprefix("pass_at/") for name in run)
    return [int(key) for key in keys if key.isdecimal()]


def _several(names: set[str]) -> list[str]:
    return sorted(names) if len(names) > 1 else []


def _source(name: str) -> str:
    return name.partition("/")[2]


def _says_nothing(plot: Plot, others: Sequence[Plot]) -> str:
    """Why a plot is left out beside others: it has no numbers, one number only, or the curves of another one; or ""."""
    if not plot.curves:
        return "without numbers"
    values = np.array(rounded(np.concatenate([curve.y for curve in plot.curves])))
    steps = np.concatenate([curve.x for curve in plot.curves])
    one = bool((values == values[0]).all()) and not (plot.constant or plot.one_group)
    # A single step has one number of everything: only 0 says nothing there.
    if one and (values[0] == 0 or len(np.unique(steps)) > 1):
        return f"always {values[0]:.4g}"
    return next((f"the same as “{other.title}”" for other in others if _same(plot, other)), "")


def _same(one: Plot, other: Plot) -> bool:
    if one.one_group or one.x != other.x or len(one.curves) != len(other.curves):
        return False
    pairs = zip(one.curves, other.curves, strict=True)
    return all(np.array_equal(a.x, b.x) and np.array_equal(a.y, b.y) for a, b in pairs)


def shown_samples(runs: Sequence[RunData], most: int = MOST_BYTES) -> list[dict[str, Any]]:
    """The samples of runs that have any, as plain values; so many of them that their JSON has at most so many bytes.

    Those of followed questions stay before others, and newer ones before older ones.
    """
    having = [run for run in runs if run.samples]
    every = [sample for run in having for sample in run.samples]
    kept: dict[int, dict[str, Any]] = {}
    size = 0
    for sample in sorted(every, key=lambda one: (one.followed, one.step), reverse=True):
        values = _values(sample)
        size += len(as_json(values)) + 1
        if size > most:
            break
        kept[id(sample)] = values
    shown = [[kept[id(sample)] for sample in run.samples if id(sample) in kept] for run in having]
    return [
        {
            "name": readable(run.name),
            "success": _success(run.config),
            "left_out": len(run.samples) - len(samples),
            "samples": samples,
        }
        for run, samples in zip(having, shown, strict=True)
    ]


def _success(config: dict[str, Any]) -> float:
    reward = config.get("reward")
    success = reward.get("success") if isinstance(reward, dict) else None
    return float(success) if isinstance(success, int | float) else SUCCESS


def _values(sample: Sample) -> dict[str, Any]:
    """Those with the names of the dataclasses; characters that cannot be seen stand by their numbers."""
    values = asdict(sample)
    for name in ("text", "gold"):
        values[name] = readable(values[name])
    for answer in values["answers"]:
        answer["parts"] = [[writer, readable(text)] for writer, text in answer["parts"]]
    return values
