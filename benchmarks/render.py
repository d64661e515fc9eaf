"""Tables of a record: `python -m benchmarks.render RECORD.json`.

RECORD.json is a file of pytest-benchmark, or an earlier record. The program writes DATE_DEVICE.json (the record) and
.md (tables) into benchmarks/results/.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.record import Record, Row, groups_of, read
from benchmarks.record import write as write_record

FENCE = "````"  # longer than fences within the texts
RESULTS = Path(__file__).parent / "results"


def seconds(value: float) -> str:
    """Format a time with three digits and its unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * scale >= 1:
            return f"{value * scale:.3g} {unit}" if value * scale < 1000 else f"{value * scale:.0f} {unit}"
    return f"{value * 1e9:.3g} ns"


def mebibytes(value: float) -> str:
    return f"{value / 2**20:,.0f}"


def spread(value: tuple[float, float, float]) -> str:
    """Format a ratio with its quartiles."""
    median, low, high = value
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


@dataclass(frozen=True)
class Column:
    """A column of the tables: title, key in a row, and format."""

    title: str
    key: str
    text: Callable[[Any], str]


COLUMNS = (
    Column("", "row", str),
    Column("median", "median", seconds),
    Column("predicted", "predicted", seconds),
    Column("floor / time", "floor_over_time", "{:.2f}".format),
    Column("time / ours", "times_ours", "{:.2f}".format),
    Column("time / on-policy", "times_on_policy", "{:.3f}".format),
    Column("time / TRL", "times_trl", spread),
    Column("time per token", "seconds_per_token", seconds),
    Column("that / TRL", "token_times_trl", spread),
    Column("peak MiB", "peak_bytes", mebibytes),
    Column("in children", "children_bytes", mebibytes),
    Column("peak / TRL", "memory_times_trl", "{:.2f}".format),
    Column("log-prob error", "log_prob_error", "{:.1e}".format),
    Column("gradient error", "gradient_error", "{:.1e}".format),
    Column("bytes / token", "bytes_per_token", "{:.2f}".format),
    Column("time / transformers", "times_transformers", "{:.2f}".format),
    Column("tokens / s", "tokens_per_second", "{:,.0f}".format),
    Column("push", "push", seconds),
    Column("wake", "wake", seconds),
    Column("sleep", "sleep", seconds),
    Column("weight gap in nats", "weight_gap", "{:.1e}".format),
    Column("mismatch in nats", "mismatch", "{:.1e}".format),
    Column("replayed", "replayed", "{:.1f}".format),
    Column("generated tokens", "generated_tokens", "{:,.0f}".format),
    Column("by phase", "phases", lambda phases: ", ".join(f"{k} {seconds(v)}" for k, v in phases.items())),
    Column("MFU", "mfu", lambda shares: ", ".join(f"{k} {v:.1%}" for k, v in shares.items())),
    Column("by size", "growth", lambda growth: ", ".join(f"{int(k):,}: {seconds(v)}" for k, v in growth.items())),
    Column("growth exponent", "exponent", "{:.2f}".format),
    Column("", "wrong", lambda wrong: "WRONG" if wrong else ""),
)


@dataclass(frozen=True)
class Grid:
    """Title, header and cells of a table."""

    title: str
    header: list[str]
    lines: list[list[str]]


def grids(rows: Iterable[Row]) -> list[Grid]:
    """Return one table per group, with the columns of any of its rows; the fastest row first."""
    result = []
    for group, members in groups_of(rows).items():
        columns = [c for c in COLUMNS if any(row.get(c.key) not in (None, False) for row in members)]
        if not any("trajectories" in row for row in members):
            members = sorted(members, key=lambda row: row["median"])
        lines = [[c.text(row[c.key]) if row.get(c.key) is not None else "" for c in columns] for row in members]
        result.append(Grid(group, [c.title for c in columns], lines))
    return result


def tables(rows: Iterable[Row]) -> list[Table]:
    drawn = []
    for grid in grids(rows):
        table = Table(title=grid.title, title_justify="left")
        for i, title in enumerate(grid.header):
            table.add_column(title, justify="left" if i == 0 else "right")
        for line in grid.lines:
            table.add_row(*line)
        drawn.append(table)
    return drawn


def markdown(record: Record) -> str:
    machine = record.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    dirty = " with changes" if record.dirty else ""
    revision = f"commit {record.commit[:10]}{dirty}" if record.commit else "no commit known"
    lines = [
        f"# Benchmarks, {record.date}, {machine.device}",
        "",
        f"{machine.cpu}, {machine.threads} threads"
        f" ({machine.cpu_capability}), Python {machine.python}, {versions}, {revision}.",
        "[How it was measured](../../docs/benchmarks.md). The rows of one table took turns. Ratios are"
        " medians, over the rounds, of the ratio within a round. Errors are against float64 on the same inputs.",
    ]
    lines += _parts(record.parts)
    for grid in grids(record.rows):
        lines += ["", f"## {grid.title}", "", f"| {' | '.join(grid.header)} |"]
        lines.append("|---" + "|---:" * (len(grid.header) - 1) + "|")
        lines += [f"| {' | '.join(line)} |" for line in grid.lines]
    if record.left_out:
        lines += ["", "## Left out", ""]
        lines += [f"- {row}: {'; '.join(reasons)}" for row, reasons in record.left_out.items()]
    for part in record.parts:
        if text := part.get("text"):
            lines += ["", f"## {part['title']}", "", FENCE, *text.rstrip().splitlines(), FENCE]
    return "\n".join(lines) + "\n"


def _parts(parts: list[dict[str, Any]]) -> list[str]:
    if not parts:
        return []
    lines = ["", "## Parts", "", "| part | came to | date | revision | seconds |", "|---|---|---|---|---:|"]
    for part in parts:
        came_to = part["problem"] or "finished"
        cells = [part["title"], came_to.replace("|", "\\|"), part.get("date", ""), part.get("revision", "")]
        lines.append(f"| {' | '.join(cells)} | {part.get('seconds', 0):.0f} |")
    return lines


def slug(device: str) -> str:
    """Return a device's name as used in file names."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def write(record: Record, folder: Path = RESULTS) -> Path:
    """Write the record and its page; return the page."""
    stem = f"{record.date}_{slug(record.machine.device)}"
    folder.mkdir(parents=True, exist_ok=True)
    write_record(record, folder / f"{stem}.json")
    page = folder / f"{stem}.md"
    page.write_text(markdown(record), encoding="utf-8")
    return page


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path, help="a record, or what --benchmark-json wrote")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for them (%(default)s)")
    options = parser.parse_args(argv)
    path = options.record
    try:
        record = read(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: {path} is no record of these benchmarks: {error}", file=sys.stderr)
        return 2
    print(write(record, options.output))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
