"""Summary of the default benchmarks: what the kernels and the trainer are worth on this machine."""

import re
from collections.abc import Iterator, Sequence

from rich.table import Table

from benchmarks.heads import FORWARD, POLICY_LOSS
from benchmarks.record import Row, groups_of
from benchmarks.render import cell, table_of
from benchmarks.timing import FLOOR, PLAIN

HEAD = re.compile(rf"({POLICY_LOSS}|{FORWARD}) (\w+) (\d+)x(\d+)x(\d+)$")
STEP = "training step: "
HEAD_COLUMNS = ("policy loss", "time / ours", "floor / time", "peak MiB", "log-probs", "time / ours", "floor / time")
TIMES = ("median", "times_ours", "floor_over_time")
STEP_KEYS = ("row", "median", "times_trl", "token_times_trl", "peak_bytes", "memory_times_trl")
STEP_COLUMNS = ("one step", "time / TRL", "time per token / TRL", "peak MiB", "peak / TRL")
Size = dict[str, dict[str, Row]]
"""Rows of one size by name and operation."""


def summarised(row: Row) -> bool:
    """True if the summary has the row."""
    return bool(HEAD.match(row["group"])) or row["group"].startswith(STEP)


def sizes_of(rows: Sequence[Row]) -> dict[str, Size]:
    """Return the rows of heads by size, those of one size in the order of their times of the policy loss."""
    sizes: dict[str, Size] = {}
    for row in sorted(rows, key=lambda row: (POLICY_LOSS not in row["group"], row["median"])):
        if (found := HEAD.match(row["group"])) and row["row"] != FLOOR:
            tokens, width, words = map(int, found.groups()[2:])
            size = f"{tokens:,} tokens, width {width:,}, vocabulary {words:,}, {found[2]}"
            sizes.setdefault(size, {}).setdefault(row["row"], {})[found[1]] = row
    return sizes


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Yield a table of heads, and one of training steps."""
    if sizes := sizes_of(rows):
        table = table_of("Policy loss, forward and backward, and log-probs, forward", HEAD_COLUMNS)
        for size, by_name in sizes.items():
            table.add_section()
            table.add_row(f"[bold]{size}")
            for name, by_operation in by_name.items():
                loss, forward = (by_operation.get(operation, {}) for operation in (POLICY_LOSS, FORWARD))
                times = [[cell(row, key) for key in TIMES] for row in (loss, forward)]
                wrong = " WRONG" * (loss.get("wrong", False) or forward.get("wrong", False))
                table.add_row(f"  {name}{wrong}", *times[0], cell(loss or forward, "peak_bytes"), *times[1])
        yield table
    for group, steps in groups_of(row for row in rows if row["group"].startswith(STEP)).items():
        table = table_of(group.capitalize(), STEP_COLUMNS)
        for row in steps:
            table.add_row(*(cell(row, key) for key in STEP_KEYS))
        yield table


def share(value: float) -> str:
    """Format a ratio, a small one as a fraction."""
    return f"1/{1 / value:.1f}".removesuffix(".0") if 0 < value < 0.4 else f"{value:.2f}"


def sentences(rows: Sequence[Row], ours: str) -> Iterator[str]:
    """Yield the answer in words, as far as the rows have it; `ours` is the row of the kernels."""
    for size, by_name in sizes_of(rows).items():
        operation, words = POLICY_LOSS, "the policy loss takes"
        if not any(POLICY_LOSS in of_row for of_row in by_name.values()):
            operation, words = FORWARD, "log-probs take"
        found = {name: of_row[operation] for name, of_row in by_name.items() if operation in of_row}
        if ours not in found or PLAIN not in found:
            continue
        text = f"{size}: {words} {share(1 / found[PLAIN]['times_ours'])} of the time of full logits"
        text += _memory(found[ours], found[PLAIN])
        if others := [row for name, row in found.items() if name not in (ours, PLAIN)]:
            text += f"; {share(1 / others[0]['times_ours'])} of the time of the fastest other, {others[0]['row']},"
            text += _memory(found[ours], others[0])
        yield f"{text}."
    for group, steps in groups_of(row for row in rows if row["group"].startswith(STEP)).items():
        parts = []
        for row in steps:
            if "times_trl" in row and row["row"] != "trl":
                time, memory = share(row["times_trl"][0]), share(row["memory_times_trl"])
                parts.append(f"{row['row']} takes {time} of the time and {memory} of the memory")
        if parts:
            yield f"{group.partition(',')[0].capitalize()}: {', '.join(parts)} of TRL's GRPOTrainer."


def _memory(mine: Row, other: Row) -> str:
    if not mine.get("peak_bytes") or not other.get("peak_bytes"):
        return ""
    return f" and {share(mine['peak_bytes'] / other['peak_bytes'])} of the memory"
