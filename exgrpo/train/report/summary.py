"""The table of a report: a line for each run, and one with the means over the seeds of a group."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from exgrpo.train.report.curves import Columns, half_width
from exgrpo.train.report.groups import ABSENT, RunGroup
from exgrpo.train.report.runs import RunData

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


@dataclass(frozen=True)
class SummaryRow:
    """A line of the summary: a run, or the mean over a group, to which its members are then added."""

    name: str
    cells: list[str]
    group: int
    member: bool


def summary_rows(number: int, group: RunGroup) -> list[SummaryRow]:
    """The lines of the group with this number: the mean, where it has several runs, and each run."""
    several = len(group.runs) > 1
    mean = [SummaryRow(group.label, _cells_of_group(group), number, member=False)] if several else []
    return mean + [SummaryRow(run.name, _cells(run), number, member=several) for run in group.runs]


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
