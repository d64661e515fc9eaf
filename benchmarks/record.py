"""Record of a benchmark run: the fields that pages and plots need, in a small JSON file.

pytest-benchmark writes thousands of lines; `summarize` extracts the fields of `Record`.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
DIGITS = 9  # significant digits of the numbers in the file
MACHINE = ("device", "cpu", "cpu_capability", "threads", "python", "versions")
UNKNOWN = ("unversioned", "unknown")  # pytest-benchmark's commit ids outside a repository


@dataclass(frozen=True)
class Record:
    """The results of one run.

    Attributes:
        date: YYYY-MM-DD.
        commit: id of the measured commit; empty if unknown.
        dirty: True if the working tree differed from the commit.
        machine: the values of MACHINE: name of the GPU, or `cpu`; its processor and the instruction set that torch
            uses; threads, Python, and versions by package.
        rows: one per benchmark, with `group`, `row` (its name), `median` and `iqr` (interquartile range) in seconds,
            and further numbers such as `peak_bytes`.
        left_out: reasons for missing rows, by name.
        parts: parts of `benchmarks.gpu`: `name`, `title`, `problem` (empty if finished) and, once started, `date`,
            `revision`, `seconds` and possibly `text`.
    """

    date: str
    commit: str
    dirty: bool
    machine: dict[str, Any]
    rows: list[Row]
    left_out: dict[str, list[str]] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)


def summarize(full: dict[str, Any]) -> Record:
    """Convert a file of pytest-benchmark; a KeyError names a missing field."""
    machine, commit = full["machine_info"], full["commit_info"]
    machine["cpu"] = machine["cpu"].get("brand_raw", machine["processor"])
    return Record(
        date=full["datetime"][:10],
        commit="" if commit["id"] in UNKNOWN else commit["id"],
        dirty=bool(commit.get("dirty")),
        machine={name: machine[name] for name in MACHINE},
        rows=[
            {"group": b["group"], "median": b["stats"]["median"], "iqr": b["stats"]["iqr"], **b["extra_info"]}
            for b in full["benchmarks"]
        ],
        left_out=full.get("left_out", {}),
    )


def groups_of(rows: Iterable[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    return groups


def read(path: Path) -> Record:
    """Read a record or a file of pytest-benchmark; raise OSError, ValueError, KeyError or TypeError."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    return summarize(fields) if "benchmarks" in fields else Record(**fields)


def write(record: Record, path: Path) -> None:
    """Write a record with one line per row, without fields that are None or False, and numbers of `DIGITS` digits."""
    fields = asdict(record)
    for name in ("left_out", "parts"):
        if not fields[name]:
            del fields[name]
    rows = [
        {key: value for key, value in row.items() if value is not None and value is not False}
        for row in fields.pop("rows")
    ]
    rows = json.loads(json.dumps(rows), parse_float=lambda digits: float(f"{float(digits):.{DIGITS}g}"))
    head = json.dumps(fields, indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")
