"""Runs of a report: their folders as columns of numbers, experiments over several seeds, and the table about them."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exgrpo.train.common.errors import ConfigError, ReportError
from exgrpo.train.common.plain import parse_yaml
from exgrpo.train.config.section import flat
from exgrpo.train.metrics.log_files import METRICS, SAMPLES, Kind, Record, read_records
from exgrpo.train.metrics.report.figures import Columns, Curve, half_width, mean_curve, readable
from exgrpo.train.metrics.samples import Sample, read_samples

Numbers = dict[str, float]
HELD_OUT = ("test", "held_out", "pass_at", "distinct_at")
"""The headings of what evaluations measure on data.test; those of other sets are the names of these sets."""
NOT_COMPARED = ("output.", "checkpoint.")
"""The beginnings of options that say where a run is kept, not what it computes."""
QUESTIONS = ("data.test", "data.columns", "evaluation.")
"""The beginnings of options that say what the evaluations measure."""
ABSENT = "\N{EN DASH}"
HEADINGS = (
    "Steps",
    "Held-out Pass@1 before",
    "Held-out Pass@1 after",
    "Change",
    "Generated tokens",
    "Training time",
    "Replayed per question",
    "Failures",
)


@dataclass(frozen=True, eq=False)
class RunColumns:
    """What can be plotted of one run: its training steps, its held-out evaluations, and both, merged by step."""

    training: Columns
    held_out: Columns
    merged: Columns


@dataclass(frozen=True, eq=False)
class RunData:
    """What a run's folder tells.

    Attributes:
        name: of the folder, with as many parents as tell it from the other runs.
        config: config.yaml; empty where it cannot be read.
        columns: what can be plotted.
        unreadable: the numbers, from 1, of the lines of metrics.jsonl that are no records.
        samples: what samples.jsonl has, in its order; none where it is not there.
    """

    name: str
    config: dict[str, Any]
    columns: RunColumns
    unreadable: list[int]
    samples: tuple[Sample, ...]


def load_run(folder: Path, name: str) -> RunData:
    """Read a run's folder.

    Raises:
        ReportError: where it holds no readable metrics.
    """
    try:
        records, unreadable = read_records(folder / METRICS)
    except OSError as error:
        raise ReportError(f"{folder} is not a run's folder: {METRICS} cannot be read ({error.strerror})") from error
    if not records:
        reason = "it is damaged" if unreadable else "nothing happened in this run"
        raise ReportError(f"{folder}: {METRICS} holds no readable record; {reason}")
    try:
        config = parse_yaml((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError):
        config = None
    try:
        samples = tuple(read_samples(folder / SAMPLES))
    except OSError:
        samples = ()
    return RunData(name, config if isinstance(config, dict) else {}, _run_columns(records), unreadable, samples)


def _run_columns(records: Iterable[Record]) -> RunColumns:
    """One row per step. A run that was resumed repeats steps: what it had done beyond is no part of it."""
    training: dict[int, Numbers] = {}
    held_out: dict[int, Numbers] = {}
    merged: dict[int, Numbers] = {}
    last = 0
    for record in records:
        step, numbers = record.step, record.numbers
        tested = _held_out(record.kind, numbers)
        if record.kind == "training":
            if step < last:
                before = [{n: row for n, row in rows.items() if n <= step} for rows in (training, held_out, merged)]
                training, held_out, merged = before
            last = step
            training[step] = {**training.get(step, {}), **numbers}
        if tested:
            held_out[step] = {**held_out.get(step, {}), **tested, "step": step}
        merged[step] = {**merged.get(step, {}), **numbers}
    columns = _columns(training)
    _add_totals(columns)
    tests = _columns(held_out)
    for name in ("generated_tokens", "seconds_so_far"):
        # What had been spent at the last training step before the evaluation.
        spent = np.concatenate([[0.0], columns.get(name, np.empty(0))])
        if len(spent) == len(columns["step"]) + 1:
            tests[name] = spent[np.searchsorted(columns["step"], tests["step"], side="right")]
    return RunColumns(columns, tests, _columns(merged))


def _held_out(kind: Kind, numbers: Numbers) -> Numbers:
    """Those of the numbers of a record that an evaluation measures."""
    named = {key.partition("/")[0] for key in numbers if key.endswith("/pass_rate")} if kind == "evaluation" else set()
    headings = {*HELD_OUT, *named}
    return {key: value for key, value in numbers.items() if key.partition("/")[0] in headings}


def _columns(rows: dict[int, Numbers]) -> Columns:
    ordered = [rows[step] for step in sorted(rows)]
    names = dict.fromkeys(["step", *(name for row in ordered for name in row)])
    return {name: np.array([row.get(name, math.nan) for row in ordered], dtype=np.float64) for name in names}


def _add_totals(columns: Columns) -> None:
    for name in ("seconds", "timed_out", "reward_failed"):
        if name in columns:
            columns[f"{name}_so_far"] = np.nancumsum(columns[name])
    if "replayed" in columns and "groups" in columns:
        columns["replayed_per_group"] = columns["replayed"] / np.maximum(columns["groups"], 1)


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs that differ in nothing but the seed, in the order they were named."""

    label: str
    runs: list[RunData]


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
    return {k: v for k, v in flat(run.config).items() if k not in ("seed", "resume") and not k.startswith(NOT_COMPARED)}


def _label(runs: Sequence[RunData]) -> str:
    more = len(runs) - 1
    return runs[0].name + (f" and {more} more seed{'s' if more > 1 else ''}" if more else "")


def differences(groups: Sequence[RunGroup]) -> dict[str, list[str]]:
    """Each option in which the groups differ, with its value in every group."""
    settings = [_settings(group.runs[0]) for group in groups]
    names = dict.fromkeys(name for options in settings for name in options)
    values = {name: [_value(options, name) for options in settings] for name in names}
    return {name: of_groups for name, of_groups in values.items() if len(set(of_groups)) > 1}


def result(groups: Sequence[RunGroup]) -> str:
    """One sentence: Pass@1 of each group after as many generated tokens, and which is ahead.

    It is empty for one group, where a group has not been evaluated in training, and where they answer other questions.
    """
    differing = [name for name in differences(groups) if name.startswith(QUESTIONS) and name != "evaluation.every"]
    tests = [[run.columns.held_out for run in group.runs] for group in groups]
    curves = [mean_curve(runs, "generated_tokens", "test/pass_rate") for runs in tests]
    tokens = min((float(curve.x[-1]) if len(curve.x) else 0.0 for curve in curves), default=0.0)
    if len(groups) < 2 or differing or not tokens:
        return ""
    names = [readable(group.label) for group in groups]
    rates = [round(float(np.interp(tokens, curve.x, curve.y)), 3) for curve in curves]
    scores = [f"{rate:.3f} for “{name}”" for rate, name in zip(rates, names, strict=True)]
    ahead = [number for number, rate in enumerate(rates) if rate == max(rates)]
    chance = "; one seed cannot tell that from chance" if any(len(group.runs) == 1 for group in groups) else ""
    verdict = f"“{names[ahead[0]]}” is ahead{chance or _overlap(curves, ahead[0], tokens)}"
    verdict = verdict if len(ahead) == 1 else "none is ahead"
    shown = f"{', '.join(scores[:-1])} and {scores[-1]}"
    return f"After {tokens:,.0f} generated tokens, held-out Pass@1 is {shown}: {verdict}."


def _overlap(curves: Sequence[Curve], best: int, tokens: float) -> str:
    """What the intervals of means over seeds say of a lead after so many tokens; nothing where they do not meet."""
    bands = [
        [math.nan if end is None else float(np.interp(tokens, curve.x, end)) for end in (curve.low, curve.high)]
        for curve in curves
    ]
    meet = any(high >= bands[best][0] for number, (_, high) in enumerate(bands) if number != best)
    return "; their 95 % intervals overlap, so it may be chance" if meet else ""


def _value(options: dict[str, Any], name: str) -> str:
    return json.dumps(options[name], default=str) if name in options else ABSENT


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


def last(columns: Columns, name: str) -> float:
    """The last number of a column; NaN where there is none."""
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


def _replayed_per_group(run: RunData) -> float:
    training = run.columns.training
    groups = np.nansum(training.get("groups", np.empty(0)))
    return float(np.nansum(training["replayed"]) / groups) if groups and "replayed" in training else math.nan


def _cells(run: RunData) -> list[str]:
    training = run.columns.training
    before, after = _before_and_after(run)
    planned = run.config.get("steps")
    done = len(training["step"])
    kinds = {"skipped_updates": "skipped", "timed_out_so_far": "timed out", "reward_failed_so_far": "reward failed"}
    counts = {kind: last(training, name) for name, kind in kinds.items()}
    failures = ", ".join(f"{count:.0f} {kind}" for kind, count in counts.items() if count > 0)
    return [
        f"{done} of {planned}" if isinstance(planned, int) and planned != done else str(done),
        number(before, ".3f"),
        number(after, ".3f"),
        number(after - before, "+.3f"),
        number(last(training, "generated_tokens"), ",.0f"),
        _duration(last(training, "seconds_so_far")),
        number(_replayed_per_group(run), ".2f"),
        failures or ("none" if any(map(math.isfinite, counts.values())) else ABSENT),
    ]


def _cells_of_group(group: RunGroup) -> list[str]:
    """Means over the seeds that have the number; intervals where a conclusion may hang on them."""
    rates = np.array([_before_and_after(run) for run in group.runs])
    tokens = [last(run.columns.training, "generated_tokens") for run in group.runs]
    times = [last(run.columns.training, "seconds_so_far") for run in group.runs]
    return [
        "mean",
        _mean(rates[:, 0], ".3f", interval=True),
        _mean(rates[:, 1], ".3f", interval=True),
        _mean(rates[:, 1] - rates[:, 0], "+.3f", interval=True),
        _mean(tokens, ",.0f"),
        _duration(float(np.mean(times))),
        _mean([_replayed_per_group(run) for run in group.runs], ".2f"),
        "",
    ]


def _mean(values: Any, form: str, *, interval: bool = False) -> str:
    there = np.array([value for value in values if math.isfinite(value)])
    if not len(there):
        return ABSENT
    half = f" ± {half_width(there[:, None])[0]:.3f}" if interval and len(there) > 1 else ""
    of = f" ({len(there)} of {len(values)})" if len(there) < len(values) else ""
    return f"{there.mean():{form}}{half}{of}"


def number(value: float, form: str) -> str:
    """A number in a form, or the sign of one that is absent."""
    return f"{value:{form}}" if math.isfinite(value) else ABSENT


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return ABSENT
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02} h" if minutes >= 60 else f"{minutes}:{rest:02} min"
