"""A table of what was tried and what came of it."""

from collections import defaultdict
from collections.abc import Iterable

from rich.table import Table

from tests.hostile.worker import Record


def table(records: Iterable[Record]) -> Table:
    """By kind: cases, how many were refused and how many right, the most that one took and left, and the problems."""
    kinds: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        kinds[record.kind].append(record)
        kinds["all"].append(record)
    shown = Table("input", "cases", "refused", "right", "longest, s", "most, MiB", "left, MiB", "problems")
    for kind, of_kind in sorted(kinds.items(), key=lambda item: (item[0] == "all", item[0])):
        counted = [sum(record.came == came for record in of_kind) for came in ("refused", "right")]
        most = (max(getattr(record, name) for record in of_kind) for name in ("seconds", "mib", "left"))
        wrong = sum(bool(record.problems) for record in of_kind)
        shown.add_row(kind, str(len(of_kind)), *map(str, counted), *(f"{value:.1f}" for value in most), str(wrong))
    return shown
