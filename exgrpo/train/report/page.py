"""The report of one or several runs: `python -m exgrpo.train.report RUN [RUN ...] [--output FILE]`.

One HTML page that needs nothing else: a summary, and plots of what metrics.jsonl holds. Runs whose configurations
differ in nothing but seed and output are drawn as one, with their mean and a 95 % confidence interval.
"""

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from exgrpo.train.dotted import flat
from exgrpo.train.errors import ExgrpoError, ReportError, print_error
from exgrpo.train.report.curves import MAX_POINTS, Columns, half_width
from exgrpo.train.report.plots import ASSETS, PlotGroup, colour, marker, sections
from exgrpo.train.report.runs import RunData, load_run

# Options that say where a run is kept, not what it computes.
ASIDE = ("output.", "checkpoint.")
MAX_LINES = 8
ABSENT = "\N{EN DASH}"
KEYS = {"": "", "o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼"}
HEADINGS = (
    "Steps",
    "Held-out Pass@1 before",
    "Held-out Pass@1 after",
    "Change",
    "Generated tokens",
    "Training time",
    "Replayed share",
    "Failures",
)


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs that differ in nothing but the seed, in the order they were named."""

    label: str
    runs: list[RunData]


@dataclass(frozen=True)
class Row:
    """A line of the summary: a run, or the mean over a group, to which its members are then added."""

    name: str
    cells: list[str]
    group: int
    member: bool


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
    folders = list(dict.fromkeys(Path(run).resolve() for run in runs))
    if not folders:
        raise ReportError("no run to report on: name at least one run's folder")
    data = [load_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    page = _page(group_runs(data))
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(output)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise ReportError(f"{output} cannot be written: {error.strerror}") from error


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    for length in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return names


def group_runs(runs: Sequence[RunData]) -> list[RunGroup]:
    """Put together what differs in nothing but the seed; a run whose configuration is not known stays alone."""
    groups: list[tuple[dict[str, Any], list[RunData]]] = []
    for run in runs:
        settings = _settings(run)
        for others, members in groups:
            # The same seed twice is one experiment twice, and would narrow the interval without reason.
            seeds = [member.config.get("seed") for member in members]
            if settings and settings == others and run.config.get("seed") not in seeds:
                members.append(run)
                break
        else:
            groups.append((settings, [run]))
    return [RunGroup(_label(members), members) for _, members in groups]


def _settings(run: RunData) -> dict[str, Any]:
    """Every option by its full name, except those in which runs of one group may differ."""
    return {k: v for k, v in flat(run.config).items() if k not in ("seed", "resume") and not k.startswith(ASIDE)}


def _label(runs: Sequence[RunData]) -> str:
    more = len(runs) - 1
    return runs[0].name + (f" and {more} more seed{'s' if more > 1 else ''}" if more else "")


def _page(groups: Sequence[RunGroup]) -> str:
    runs = [run for group in groups for run in group.runs]
    environment = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html").render(
        title=f"ExGRPO report: {runs[0].name if len(runs) == 1 else f'{len(runs)} runs'}",
        headings=HEADINGS,
        rows=[row for i, group in enumerate(groups) for row in _rows(i, group)],
        notes=_notes(groups),
        warnings=[
            f"{run.name}: unreadable lines of metrics.jsonl left out: {_lines(run.unreadable)}"
            for run in runs
            if run.unreadable
        ],
        looks=[
            {"label": group.label, "colour": colour(i), "marker": KEYS[marker(i)]} for i, group in enumerate(groups)
        ],
        sections=sections([PlotGroup(group.label, [run.columns for run in group.runs]) for group in groups]),
        differences=_differences(groups),
        configurations={run.name: yaml.safe_dump(run.config, sort_keys=False) for run in runs if run.config},
    )


def _lines(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:MAX_LINES])) + (", ..." if len(numbers) > MAX_LINES else "")
    return f"{len(numbers)} (line {shown})"


def _notes(groups: Sequence[RunGroup]) -> list[str]:
    """What a reader has to know about the table and all plots."""
    notes = ["The replayed share is that of all groups which had a replayed trajectory."]
    if any(len(group.runs) > 1 for group in groups):
        notes.append(
            "Runs that differ in nothing but the seed are one curve: thick lines are means over seeds, bands and ± are "
            "95 % confidence intervals of the mean (Student's t), thin lines are the single seeds. A mean is taken at "
            "steps which every seed has reached."
        )
    if any(len(run.columns.training["step"]) > MAX_POINTS for group in groups for run in group.runs):
        notes.append(f"Lines of more than {MAX_POINTS:,} points are drawn as means over equally many neighbours.")
    return notes


def _rows(number: int, group: RunGroup) -> list[Row]:
    several = len(group.runs) > 1
    mean = [Row(group.label, _cells_of_group(group), number, member=False)] if several else []
    return mean + [Row(run.name, _cells(run), number, member=several) for run in group.runs]


def _last(columns: Columns, name: str) -> float:
    values = columns.get(name, np.empty(0))
    values = values[np.isfinite(values)]
    return float(values[-1]) if len(values) else math.nan


def _before_and_after(run: RunData) -> tuple[float, float]:
    """Held-out Pass@1 before the first step, and at the last evaluation after it; NaN where there is none."""
    tests = run.columns.held_out
    rates = tests.get("test/pass_rate", np.empty(0))
    first, later = rates[tests["step"][: len(rates)] == 0], rates[tests["step"][: len(rates)] > 0]
    later = later[np.isfinite(later)]
    return float(first[0]) if len(first) else math.nan, float(later[-1]) if len(later) else math.nan


def _replayed_share(run: RunData) -> float:
    training = run.columns.training
    groups = np.nansum(training.get("groups", np.empty(0)))
    return float(np.nansum(training["replayed"]) / groups) if groups and "replayed" in training else math.nan


def _cells(run: RunData) -> list[str]:
    training = run.columns.training
    before, after = _before_and_after(run)
    planned = run.config.get("steps")
    done = len(training["step"])
    kinds = {"skipped_updates": "skipped", "timed_out_so_far": "timed out", "reward_failed_so_far": "reward failed"}
    counts = {kind: _last(training, name) for name, kind in kinds.items()}
    failures = ", ".join(f"{count:.0f} {kind}" for kind, count in counts.items() if count > 0)
    return [
        f"{done} of {planned}" if isinstance(planned, int) and planned != done else str(done),
        _number(before, ".3f"),
        _number(after, ".3f"),
        _number(after - before, "+.3f"),
        _number(_last(training, "generated_tokens"), ",.0f"),
        _duration(_last(training, "seconds_so_far")),
        _number(_replayed_share(run), ".1%"),
        failures or ("none" if any(map(math.isfinite, counts.values())) else ABSENT),
    ]


def _cells_of_group(group: RunGroup) -> list[str]:
    """Means over the seeds that have the number; intervals where a conclusion may hang on them."""
    rates = np.array([_before_and_after(run) for run in group.runs])
    tokens = [_last(run.columns.training, "generated_tokens") for run in group.runs]
    times = [_last(run.columns.training, "seconds_so_far") for run in group.runs]
    return [
        "mean",
        _mean(rates[:, 0], ".3f", interval=True),
        _mean(rates[:, 1], ".3f", interval=True),
        _mean(rates[:, 1] - rates[:, 0], "+.3f", interval=True),
        _mean(tokens, ",.0f"),
        _duration(float(np.mean(times))),
        _mean([_replayed_share(run) for run in group.runs], ".1%"),
        "",
    ]


def _mean(values: Any, form: str, *, interval: bool = False) -> str:
    there = np.array([value for value in values if math.isfinite(value)])
    if not len(there):
        return ABSENT
    half = f" ± {half_width(there[:, None])[0]:.3f}" if interval and len(there) > 1 else ""
    of = f" ({len(there)} of {len(values)})" if len(there) < len(values) else ""
    return f"{there.mean():{form}}{half}{of}"


def _number(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else ABSENT


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return ABSENT
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02} h" if minutes >= 60 else f"{minutes}:{rest:02} min"


def _differences(groups: Sequence[RunGroup]) -> dict[str, list[str]]:
    """Each option in which the groups differ, with its value in every group."""
    settings = [_settings(group.runs[0]) for group in groups]
    names = dict.fromkeys(name for options in settings for name in options)
    values = {name: [_value(options, name) for options in settings] for name in names}
    return {name: of_groups for name, of_groups in values.items() if len(set(of_groups)) > 1}


def _value(options: dict[str, Any], name: str) -> str:
    return json.dumps(options[name], default=str) if name in options else ABSENT


@dataclass(frozen=True)
class Arguments:
    """Write a report about runs as one HTML page."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs."""
    output: Path | None = None
    """The page; RUN/report.html where there is one run, else report.html in the current folder."""


def main(argv: list[str]) -> int:
    """Run the program; returns its exit status."""
    arguments = tyro.cli(Arguments, args=argv, prog="python -m exgrpo.train.report")
    single = arguments.runs[0] if len(arguments.runs) == 1 else Path()
    output = arguments.output or single / "report.html"
    try:
        write_report(arguments.runs, output)
    except ExgrpoError as error:
        return print_error(error)
    print(f"report in {output}")
    return 0
