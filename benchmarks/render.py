"""Tables of a record: `python -m benchmarks.render RECORD.json`.

RECORD.json is a file of pytest-benchmark, or an earlier record. The program writes DATE_DEVICE.json (the record) and
.md (tables) into benchmarks/results/.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

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


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "row": ("", str),
    "median": ("median", seconds),
    "predicted": ("predicted", seconds),
    "floor_over_time": ("floor / time", "{:.2f}".format),
    "times_ours": ("time / ours", "{:.2f}".format),
    "times_on_policy": ("time / on-policy", "{:.3f}".format),
    "times_trl": ("time / TRL", spread),
    "seconds_per_token": ("time per token", seconds),
    "token_times_trl": ("that / TRL", spread),
    "peak_bytes": ("peak MiB", mebibytes),
    "children_bytes": ("in children", mebibytes),
    "memory_times_trl": ("peak / TRL", "{:.2f}".format),
    "log_prob_error": ("log-prob error", "{:.1e}".format),
    "gradient_error": ("gradient error", "{:.1e}".format),
    "bytes_per_token": ("bytes / token", "{:.2f}".format),
    "times_transformers": ("time / transformers", "{:.2f}".format),
    "tokens_per_second": ("tokens / s", "{:,.0f}".format),
    "push": ("push", seconds),
    "wake": ("wake", seconds),
    "sleep": ("sleep", seconds),
    "weight_gap": ("weight gap in nats", "{:.1e}".format),
    "mismatch": ("mismatch in nats", "{:.1e}".format),
    "replayed": ("replayed", "{:.1f}".format),
    "generated_tokens": ("generated tokens", "{:,.0f}".format),
    "phases": ("by phase", lambda phases: ", ".join(f"{k} {seconds(v)}" for k, v in phases.items())),
    "mfu": ("MFU", lambda shares: ", ".join(f"{k} {v:.1%}" for k, v in shares.items())),
    "growth": ("by size", lambda growth: ", ".join(f"{int(k):,}: {seconds(v)}" for k, v in growth.items())),
    "exponent": ("growth exponent", "{:.2f}".format),
    "wrong": ("", lambda wrong: "WRONG" if wrong else ""),
}
"""Title of a column and format of its values, by key in a row."""


class Grid(NamedTuple):
    """Title, header and cells of a table."""

    title: str
    header: list[str]
    lines: list[list[str]]


def cell(row: Row, key: str) -> str:
    """Format a number of a row; "" if it has none."""
    return "" if row.get(key) is None else COLUMNS[key][1](row[key])


def grids(rows: Iterable[Row]) -> list[Grid]:
    """Return one table per group, with the columns of any of its rows; the fastest row first."""
    result = []
    for group, members in groups_of(rows).items():
        keys = [key for key in COLUMNS if any(row.get(key) not in (None, False) for row in members)]
        if not any("trajectories" in row for row in members):
            members = sorted(members, key=lambda row: row["median"])
        lines = [[cell(row, key) for key in keys] for row in members]
        result.append(Grid(group, [COLUMNS[key][0] for key in keys], lines))
    return result


def tables(rows: Iterable[Row]) -> Iterator[Table]:
    """Yield the tables of a terminal."""
    for grid in grids(rows):
        table = Table("", title=grid.title, title_justify="left")
        for column in grid.header[1:]:
            table.add_column(column, justify="right")
        for line in grid.lines:
            table.add_row(*line)
        yield table


def markdown(record: Record) -> str:
    machine = record.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    dirty = " with changes" if record.dirty else ""
    revision = f"commit {record.commit[:10]}{dirty}" if record.commit else "no commit known"
    lines = [
        f"# Benchmarks, {record.date}, {machine['device']}",
        "",
        f"{machine['cpu']}, {machine['threads']} threads"
        f" ({machine['cpu_capability']}), Python {machine['python']}, {versions}, {revision}.",
        "[How it was measured](../../docs/benchmarks.md). The rows of one table took turns. Ratios are"
        " medians, over the rounds, of the ratio within a round. Errors are against float64 on the same inputs.",
    ]
    if record.parts:
        lines += ["", "## Parts", "", "| part | came to | date | revision | seconds |", "|---|---|---|---|---:|"]
    for part in record.parts:
        came_to = (part["problem"] or "finished").replace("|", "\\|")
        when, seconds = f"{part.get('date', '')} | {part.get('revision', '')}", part.get("seconds", 0)
        lines.append(f"| {part['name']} | {came_to} | {when} | {seconds:.0f} |")
    for grid in grids(record.rows):
        lines += ["", f"## {grid.title}", "", f"| {' | '.join(grid.header)} |"]
        lines.append("|---" + "|---:" * (len(grid.header) - 1) + "|")
        lines += [f"| {' | '.join(line)} |" for line in grid.lines]
    if record.left_out:
        lines += ["", "## Left out", ""]
        lines += [f"- {row}: {'; '.join(reasons)}" for row, reasons in record.left_out.items()]
    for part in record.parts:
        if text := part.get("text"):
            lines += ["", f"## {part['name']}", "", FENCE, *text.rstrip().splitlines(), FENCE]
    return "\n".join(lines) + "\n"


def slug(device: str) -> str:
    """Return a device's name as used in file names."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def write(record: Record, folder: Path = RESULTS) -> Path:
    """Write the record and its page; return the page."""
    stem = f"{record.date}_{slug(record.machine['device'])}"
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
    try:
        record = read(options.record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: {options.record} is no record of these benchmarks: {error}", file=sys.stderr)
        return 2
    print(write(record, options.output))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
