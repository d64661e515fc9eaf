"""A run's folder as columns of numbers."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from exgrpo.train.report_curves import Columns

Record = dict[str, float]

HUGE = 1e300


class ReportError(ValueError):
    """A folder that cannot be reported on, or a page that cannot be written; the message names it."""


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
        unreadable: number of lines of metrics.jsonl that are no records.
    """

    name: str
    config: dict[str, Any]
    columns: RunColumns
    unreadable: int


def load_run(folder: Path, name: str) -> RunData:
    """Read a run's folder.

    Raises:
        ReportError: where it holds no readable metrics.
    """
    path = folder / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ReportError(f"{folder} is not a run's folder: metrics.jsonl cannot be read ({error.strerror})") from error
    records = [_record(line) for line in lines if line.strip()]
    readable = [record for record in records if record is not None]
    if not readable:
        raise ReportError(f"{folder}: metrics.jsonl holds no readable record; nothing happened in this run")
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        config = None
    columns = _run_columns(readable)
    return RunData(name, config if isinstance(config, dict) else {}, columns, len(records) - len(readable))


def _record(line: str) -> Record | None:
    """The numbers of a line; None where it is none of metrics.jsonl, as the cut last line of a killed run."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    numbers = {key: value for key, value in record.items() if type(value) in (int, float) and abs(value) < HUGE}
    return numbers if float(numbers.get("step", -1)).is_integer() and numbers.get("step", -1) >= 0 else None


def _run_columns(records: Iterable[Record]) -> RunColumns:
    """One row per step. A run that was resumed repeats steps: what it had done beyond is no part of it."""
    training: dict[int, Record] = {}
    held_out: dict[int, Record] = {}
    merged: dict[int, Record] = {}
    last = 0
    for record in records:
        step = int(record["step"])
        tested = {key: value for key, value in record.items() if key.startswith("test/")}
        # Only training steps have numbers without a heading.
        if any("/" not in key for key in record if key != "step"):
            if step < last:
                training, held_out, merged = (_until(step, rows) for rows in (training, held_out, merged))
            last = step
            training[step] = {**training.get(step, {}), **record}
        if tested:
            held_out[step] = {**held_out.get(step, {}), **tested, "step": step}
        merged[step] = {**merged.get(step, {}), **record}
    columns = _columns(training)
    _add_totals(columns)
    tests = _columns(held_out)
    for name in ("generated_tokens", "seconds_so_far"):
        # What had been spent at the last training step before the evaluation.
        spent = np.concatenate([[0.0], columns.get(name, np.empty(0))])
        if len(spent) == len(columns["step"]) + 1:
            tests[name] = spent[np.searchsorted(columns["step"], tests["step"], side="right")]
    return RunColumns(columns, tests, _columns(merged))


def _until(step: int, rows: dict[int, Record]) -> dict[int, Record]:
    return {other: row for other, row in rows.items() if other <= step}


def _columns(rows: dict[int, Record]) -> Columns:
    ordered = [rows[step] for step in sorted(rows)]
    names = dict.fromkeys(["step", *(name for row in ordered for name in row)])
    return {name: np.array([row.get(name, math.nan) for row in ordered], dtype=np.float64) for name in names}


def _add_totals(columns: Columns) -> None:
    for name in ("seconds", "timed_out", "reward_failed"):
        if name in columns:
            columns[f"{name}_so_far"] = np.nancumsum(columns[name])
    if "replayed" in columns and "groups" in columns:
        columns["replayed_share"] = columns["replayed"] / np.maximum(columns["groups"], 1)
