"""One self-contained HTML page about one or several runs: a summary, and plots of what metrics.jsonl holds.

Runs whose configurations differ in nothing but seed and output are drawn as one, with their mean and a 95 % confidence
interval.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from exgrpo.train.errors import ReportError
from exgrpo.train.report.curves import MAX_POINTS
from exgrpo.train.report.draw import PlotGroup
from exgrpo.train.report.groups import RunGroup, changes, differences, group_runs
from exgrpo.train.report.looks import colour, key
from exgrpo.train.report.plots import ASSETS, sections
from exgrpo.train.report.runs import RunData, load_run
from exgrpo.train.report.samples import bounded, for_page, samples_of
from exgrpo.train.report.summary import HEADINGS, summary_rows
from exgrpo.train.report.template import template

MAX_LINES = 8


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
    data = [load_run(folder, name) for folder, name in named(runs).items()]
    page = page_about(data)
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
    alone = runs[0] if len(runs) == 1 else None
    return template(ASSETS / "page.html").render(
        title=title if runs else "ExGRPO report",
        followed=bool(version),
        version=version,
        headings=HEADINGS,
        rows=[row for i, group in enumerate(groups) for row in summary_rows(i, group)],
        notes=_notes(groups),
        warnings=[*waiting, *_damage(runs)],
        looks=[{"label": group.label, "colour": colour(i), "marker": key(i)} for i, group in enumerate(groups)],
        sections=sections([PlotGroup(group.label, [run.columns for run in group.runs]) for group in groups]),
        differences=differences(groups),
        samples=for_page(bounded(samples_of(runs))),
        changes={alone.name: changes(alone)} if alone and alone.config else {},
        configurations={run.name: yaml.safe_dump(run.config, sort_keys=False) for run in runs if run.config},
    )


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
    notes = ["The replayed share is that of all groups which had a replayed trajectory."]
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
