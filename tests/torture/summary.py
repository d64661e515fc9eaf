"""Tables of what was tried and what came of it."""

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.table import Table

from tests.torture.campaign import Record


def counts(records: Iterable[Record]) -> dict[str, Counter[str]]:
    """So many kills by moment, damages by way, and cases by what they are."""
    found: dict[str, Counter[str]] = {"kills": Counter(), "damages": Counter(), "cases": Counter()}
    for record in records:
        found["kills"].update(record.kills)
        found["damages"].update(way for way, path in record.damages if "/" in path)
        found["cases"][record.what] += 1
    return found


def table(records: Sequence[Record]) -> Table:
    """What was done, of what kind, how often, and how often not everything was kept that is promised."""
    shown = Table("tried", "", "so often")
    for group, counted in counts(records).items():
        for name, number in sorted(counted.items()):
            shown.add_row(group, name, str(number))
        shown.add_row(group, "all", str(counted.total()), end_section=True)
    refused = sum(record.what != "kills" and record.step is None for record in records)
    shown.add_row("without a sound checkpoint", "", str(refused))
    shown.add_row("damaged files that are not read", "", str(sum(len(record.unread) for record in records)))
    shown.add_row("cases with a problem", "", str(sum(bool(record.problems) for record in records)))
    return shown
