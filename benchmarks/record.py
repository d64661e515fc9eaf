"""The record of a benchmark run: the few fields that pages and plots need, in a small JSON file.

pytest-benchmark writes thousands of lines; `summarize` takes out of them what `Record` holds.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
DIGITS = 9
"""Significant digits of the numbers in the file."""
UNKNOWN = ("unversioned", "unknown")
"""What pytest-benchmark writes where it finds no commit."""


@dataclass(frozen=True)
class Machine:
    """Where a run was measured.

    Attributes:
        device: name of the GPU, or `cpu`.
        cpu: name of the processor.
        cpu_capability: instruction set that torch uses on it.
        threads: of torch.
        python: version of Python.
        versions: of the packages, by name.
    """

    device: str
    cpu: str
    cpu_capability: str
    threads: int
    python: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Record:
    """The results of one run.

    Attributes:
        date: YYYY-MM-DD.
        commit: id of the measured commit; empty where none is known.
        dirty: whether the working tree differed from the commit.
        machine: where it was measured.
        rows: one for each benchmark. Each has `group`, `row` (its name), `median` and `iqr` (the interquartile range)
            in seconds, and what the benchmark reported besides, such as `peak_bytes`.
        left_out: why rows are not there, by their names.
        parts: of a day on a GPU; each has `name`, `title`, `problem` (empty where it is finished) and, where it was
            begun, `date`, `revision`, `seconds` and maybe a `text`.
    """

    date: str
    commit: str
    dirty: bool
    machine: Machine
    rows: list[Row]
    left_out: dict[str, list[str]] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)


def summarize(full: dict[str, Any]) -> Record:
    """Return the record of what pytest-benchmark wrote; a KeyError names a field that is missing."""
    machine, commit = full["machine_info"], full["commit_info"]
    return Record(
        date=full["datetime"][:10],
        commit="" if commit["id"] in UNKNOWN else commit["id"],
        dirty=bool(commit.get("dirty")),
        machine=Machine(
            cpu=machine["cpu"].get("brand_raw", machine["processor"]),
            **{name: machine[name] for name in ("device", "cpu_capability", "threads", "python", "versions")},
        ),
        rows=[
            {"group": b["group"], "median": b["stats"]["median"], "iqr": b["stats"]["iqr"], **b["extra_info"]}
            for b in full["benchmarks"]
        ],
        left_out=full.get("left_out", {}),
    )


def groups_of(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by group; groups are in the order of their first rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    return groups


def read(path: Path) -> Record:
    """Read a record, or what pytest-benchmark wrote.

    Raises OSError for a file that cannot be read, and ValueError, KeyError or TypeError for one that is neither.
    """
    fields = json.loads(path.read_text(encoding="utf-8"))
    if "benchmarks" in fields:
        return summarize(fields)
    return Record(**fields | {"machine": Machine(**fields["machine"])})


def write(record: Record, path: Path) -> None:
    """Write a record, one line for each row; fields of a row that are None or False are left out."""
    fields = asdict(record)
    for name in ("left_out", "parts"):
        if not fields[name]:
            del fields[name]
    rows = [
        {key: _rounded(value) for key, value in row.items() if value is not None and value is not False}
        for row in fields.pop("rows")
    ]
    head = json.dumps(fields, indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(of_key) for key, of_key in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
