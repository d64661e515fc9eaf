"""Read runs for a report: columns of numbers, groups over seeds, mean curves and the summary table."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from exgrpo.train.common.errors import ConfigError, ReportError
from exgrpo.train.common.plain import parse_yaml
from exgrpo.train.config.section import flat
from exgrpo.train.metrics.log_files import METRICS, SAMPLES, Record, Sample, read_records, read_samples

FloatArray = npt.NDArray[np.float64]
MetricColumns = dict[str, FloatArray]
"""Numbers by name, one per step, NaN where a step lacks one; "step" is strictly increasing."""
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
NOT_COMPARED = ("output.", "checkpoint.", "resume", "seed")
"""Prefixes of options in which runs of one group may differ."""
QUESTIONS = ("data.test", "data.columns", "evaluation.")
"""Prefixes of options that define what evaluations measure."""
ABSENT = "\N{EN DASH}"
HEADINGS = ("Steps", "Held-out Pass@1 before", "After", "Change", "Generated tokens", "Minutes", "Replayed", "Failures")
FORMATS = (",.0f", ".3f", ".3f", "+.3f", ",.0f", ",.1f", ".2f", ",.0f")


@dataclass(frozen=True, eq=False)
class RunData:
    """Content of a run's folder.

    Attributes:
        config: config.yaml; empty if it cannot be read.
        columns: numbers of metrics.jsonl, a row per step of training or evaluation; "trained" is 1 at training steps,
            and "training_minutes" a sum since the start.
        unreadable: numbers, from 1, of the lines of metrics.jsonl that are no records.
        samples: samples of samples.jsonl in their order; empty without that file.
    """

    name: str
    config: dict[str, Any]
    columns: MetricColumns
    unreadable: list[int]
    samples: tuple[Sample, ...]


Groups = dict[str, list[RunData]]
"""Runs that differ only in the seed, by label, in the order they were given."""


def load_run(folder: Path, name: str) -> RunData:
    """Read a run's folder; raise ReportError if it holds no readable metrics."""
    try:
        records, unreadable = read_records(folder / METRICS)
    except OSError as error:
        raise ReportError(f"{folder} is not a run's folder: {METRICS} cannot be read ({error.strerror})") from error
    if not records:
        raise ReportError(f"{folder}: {METRICS} holds no readable record: the run has not begun, or it is damaged")
    try:
        config = parse_yaml((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError):
        config = None
    samples = tuple(read_samples(folder / SAMPLES)) if (folder / SAMPLES).is_file() else ()
    return RunData(name, config if isinstance(config, dict) else {}, _columns(records), unreadable, samples)


def _columns(records: Iterable[Record]) -> MetricColumns:
    rows: dict[int, dict[str, float]] = {}
    last_step = 0
    for record in records:
        numbers = record.numbers
        if record.kind == "training":
            if record.step < last_step:  # a resumed run repeats the steps after its checkpoint
                rows = {step: row for step, row in rows.items() if step <= record.step}
            last_step = record.step
            numbers = {**numbers, "trained": 1}
        rows[record.step] = {**rows.get(record.step, {}), **numbers}
    ordered = [rows[step] for step in sorted(rows)]
    names = dict.fromkeys(["step", "trained", *(name for row in ordered for name in row)])
    columns = {name: np.array([row.get(name, math.nan) for row in ordered], dtype=np.float64) for name in names}
    if "seconds" in columns:
        columns["training_minutes"] = np.nancumsum(columns["seconds"]) / 60
    if "generated_tokens" in columns:  # cumulative: an evaluation between steps gets the value of the step before
        columns["generated_tokens"] = np.maximum.accumulate(np.nan_to_num(columns["generated_tokens"]))
    return columns


def group_runs(runs: Sequence[RunData]) -> Groups:
    """Group runs that differ in the seed alone; a run without a readable configuration is a group of its own."""
    groups: list[list[RunData]] = []
    for run in runs:
        for members in groups:
            # The same seed twice is the same experiment: it must not narrow the interval.
            seeds = [member.config.get("seed") for member in members]
            if run.config and _settings(run) == _settings(members[0]) and run.config.get("seed") not in seeds:
                members.append(run)
                break
        else:
            groups.append([run])
    more = [f" and {len(of) - 1} more seed{'s' if len(of) > 2 else ''}" if len(of) > 1 else "" for of in groups]
    return {members[0].name + label: members for members, label in zip(groups, more, strict=True)}


def _settings(run: RunData) -> dict[str, str]:
    settings = {name: value for name, value in flat(run.config).items() if not name.startswith(NOT_COMPARED)}
    return {name: json.dumps(value, default=str) for name, value in settings.items()}


class Curve(NamedTuple):
    """Points of a line; `low` and `high` are the bounds of the interval around y, or None."""

    x: FloatArray
    y: FloatArray
    low: FloatArray | None = None
    high: FloatArray | None = None


def half_width(values: FloatArray) -> FloatArray:
    """Return half the 95 % confidence interval (Student's t) of the mean over the first axis of [runs, ...]."""
    freedom = len(values) - 1
    # Cornish and Fisher's expansion around the normal quantile: its error is below 5e-4 from 11 degrees on.
    quantile = 1.95996 + 2.37227 / freedom + 2.82250 / freedom**2 + 2.55585 / freedom**3
    quantile = STUDENT_T[freedom - 1] if freedom <= len(STUDENT_T) else quantile
    return quantile * values.std(axis=0, ddof=1) / math.sqrt(len(values))


def mean_curve(runs: Sequence[MetricColumns], x: str, y: str, interval: Sequence[str] = ()) -> Curve:
    """Average runs at the steps where every run has the numbers; runs without any of them are left out.

    x is averaged, too, so that a mean is drawn at its mean cost. `interval` names the two columns with the bounds of
    the interval of a single run.
    """
    known = [(run, np.isfinite(run[x] + run[y])) for run in runs if {x, y} <= run.keys()]
    having = [(run, run["step"][there]) for run, there in known if there.any()]
    if not having:
        return Curve(np.empty(0), np.empty(0))
    steps = reduce(np.intersect1d, [reached for _, reached in having])
    rows = [(run, np.searchsorted(run["step"], steps)) for run, _ in having]
    xs, ys = (np.array([run[name][row] for run, row in rows]) for name in (x, y))
    mean = ys.mean(axis=0)
    if len(rows) > 1:
        return Curve(xs.mean(axis=0), mean, mean - half_width(ys), mean + half_width(ys))
    ends = [run[end][row] for run, row in rows for end in interval if len(runs) == 1 and end in run]
    return Curve(xs[0], mean, *ends) if len(ends) == 2 and np.isfinite(ends).all() else Curve(xs[0], mean)


def differences(groups: Groups) -> list[list[str]]:
    """Return each option in which the groups differ, followed by its value in every group."""
    settings = [_settings(runs[0]) for runs in groups.values()]
    names = dict.fromkeys(name for options in settings for name in options)
    rows = [[name, *(options.get(name, ABSENT) for options in settings)] for name in names]
    return [row for row in rows if len({*row[1:]}) > 1]


def result(groups: Groups) -> str:
    """Return a sentence with Pass@1 of each group after equally many generated tokens, and which is ahead.

    Empty for one group, for a group without evaluations, and for groups with different questions.
    """
    differing = [name for name, *_ in differences(groups) if name.startswith(QUESTIONS) and name != "evaluation.every"]
    columns = [[run.columns for run in runs] for runs in groups.values()]
    curves = [mean_curve(of, "generated_tokens", "test/pass_rate") for of in columns]
    tokens = min((float(curve.x[-1]) if len(curve.x) else 0.0 for curve in curves), default=0.0)
    if len(groups) < 2 or differing or not tokens:
        return ""
    ends = [[float(np.interp(tokens, x, y)) for y in ys if y is not None] for x, *ys in curves]
    rates = [round(rate, 3) for rate, *_ in ends]
    best = rates.index(max(rates))
    verdict = f"“{list(groups)[best]}” is ahead"
    if rates.count(rates[best]) > 1:
        verdict = "none is ahead"
    elif any(len(end) == 1 for end in ends):
        verdict += "; one seed cannot tell that from chance"
    elif any(high >= ends[best][1] for i, (_, _, high) in enumerate(ends) if i != best):
        verdict += "; their 95 % intervals overlap, so it may be chance"
    *most, final = [f"{rate:.3f} for “{label}”" for rate, label in zip(rates, groups, strict=True)]
    return f"After {tokens:,.0f} generated tokens, held-out Pass@1 is {', '.join(most)} and {final}: {verdict}."


def summary(label: str, runs: Sequence[RunData]) -> list[list[str]]:
    """Return a group's rows of the summary table: a row of means if it has several runs, and a row per run."""
    rows = {run.name: [_numbers(run.columns)] for run in runs}
    if len(runs) > 1:
        rows = {label: [numbers for (numbers,) in rows.values()], **rows}
    return [[name, *map(_mean, zip(*numbers, strict=True), FORMATS)] for name, numbers in rows.items()]


def _numbers(columns: MetricColumns) -> list[float]:
    """Return a run's numbers in the order of `HEADINGS`."""
    began = int(columns["step"][0] == 0)
    before, after = (last(columns, "test/pass_rate", rows) for rows in (slice(began), slice(began, None)))
    tokens, minutes, skipped = (last(columns, of) for of in ("generated_tokens", "training_minutes", "skipped_updates"))
    summed = ("trained", "groups", "replayed", "timed_out", "reward_failed")
    trained, groups, replayed, *failed = (float(np.nansum(columns.get(name, 0.0))) for name in summed)
    share = replayed / groups if groups else math.nan
    return [trained, before, after, after - before, tokens, minutes, share, np.nansum([skipped, *failed])]


def _mean(values: Sequence[float], form: str) -> str:
    """Format the mean over runs that have the number, with half its 95 % interval if there are several."""
    known = np.array(values)[np.isfinite(values)]
    if not len(known):
        return ABSENT
    half = f" ± {half_width(known):{form.lstrip('+')}}" if len(known) > 1 else ""
    return f"{known.mean():{form}}{half}" + (f" ({len(known)} of {len(values)})" if len(known) < len(values) else "")


def last(columns: MetricColumns, name: str, rows: slice = slice(None)) -> float:
    """Return the last finite number of some rows of a column; NaN if there is none."""
    values = columns.get(name, np.empty(0))[rows]
    values = values[np.isfinite(values)]
    return float(values[-1]) if len(values) else math.nan
