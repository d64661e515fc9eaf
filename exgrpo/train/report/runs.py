"""A run's folder as columns of numbers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from exgrpo.train.checkpoint.log_files import METRICS, SAMPLES, Kind, Record, read_records
from exgrpo.train.errors import ReportError
from exgrpo.train.report.curves import Columns
from exgrpo.train.samples import Sample, read_samples

Numbers = dict[str, float]
RENAMED = {"rollout_tokens_per_second": "tokens_per_second/generate"}
"""Numbers that older runs have under another name."""
HELD_OUT = ("test", "held_out", "pass_at", "distinct_at")
"""The headings of what evaluations measure on data.test; those of other sets are the names of these sets."""


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
        samples: what samples.jsonl has, in its order; older versions have written none.
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
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        config = None
    samples = _samples(folder / SAMPLES)
    return RunData(name, config if isinstance(config, dict) else {}, _run_columns(records), unreadable, samples)


def _samples(path: Path) -> tuple[Sample, ...]:
    try:
        return tuple(read_samples(path))
    except OSError:
        return ()


def _run_columns(records: Iterable[Record]) -> RunColumns:
    """One row per step. A run that was resumed repeats steps: what it had done beyond is no part of it."""
    training: dict[int, Numbers] = {}
    held_out: dict[int, Numbers] = {}
    merged: dict[int, Numbers] = {}
    last = 0
    for record in records:
        step = record.step
        numbers = {RENAMED.get(name, name): value for name, value in record.numbers.items()}
        tested = _held_out(record.kind, numbers)
        if record.kind == "training":
            if step < last:
                training, held_out, merged = (_until(step, rows) for rows in (training, held_out, merged))
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


def _until(step: int, rows: dict[int, Numbers]) -> dict[int, Numbers]:
    return {other: row for other, row in rows.items() if other <= step}


def _columns(rows: dict[int, Numbers]) -> Columns:
    ordered = [rows[step] for step in sorted(rows)]
    names = dict.fromkeys(["step", *(name for row in ordered for name in row)])
    return {name: np.array([row.get(name, math.nan) for row in ordered], dtype=np.float64) for name in names}


def _add_totals(columns: Columns) -> None:
    for name in ("seconds", "timed_out", "reward_failed"):
        if name in columns:
            columns[f"{name}_so_far"] = np.nancumsum(columns[name])
    if "replayed" in columns and "groups" in columns:
        columns["replayed_share"] = columns["replayed"] / np.maximum(columns["groups"], 1)
