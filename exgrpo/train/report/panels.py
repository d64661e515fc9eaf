"""The plots of lines in a report, and those of them that depend on what the runs have measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exgrpo.train.report.curves import Columns
from exgrpo.train.report.runs import RunColumns


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


PASS_RATE = "/pass_rate"
"""Ends the name of Pass@1 of a set of held-out questions."""


def source_panels(runs: Sequence[RunColumns]) -> list[Panel]:
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


def variety_panels(runs: Sequence[RunColumns]) -> list[Panel]:
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
