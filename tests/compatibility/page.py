"""The table of docs/compatibility.md, from a record."""

from pathlib import Path

from packaging.version import Version

from exgrpo.train.errors import DataError
from tests.compatibility.record import FOLDER, Entry, newest, read
from tests.compatibility.suites import PACKAGES

PAGE = FOLDER.with_suffix(".md")
BEGIN, END = "<!-- the table: python -m tests.compatibility --table -->", "<!-- the end of the table -->"


def result(entry: Entry) -> str:
    """What came of a version."""
    if entry.not_tried:
        return f"not tried: {entry.not_tried}"
    return "works" if entry.works else f"fails: `{entry.first_failure.replace('|', '/').replace('`', '')}`"


def table(path: Path) -> str:
    """The lines of the table of a record."""
    lines = [
        f"The record is [{path.name}](compatibility/{path.name}).",
        "",
        "| package | allowed | version | it is the | Python | modules | passed | failed | skipped | date | result |",
        "|---|---|---|---|---|---:|---:|---:|---:|---|---|",
    ]
    order = [package.name for package in PACKAGES]
    for entry in sorted(read(path), key=lambda entry: (order.index(entry.package), Version(entry.version))):
        tried = not entry.not_tried
        counts = (entry.imported, entry.passed, entry.failed, entry.skipped)
        numbers = " | ".join(str(count) if tried else "" for count in counts)
        end = ", ".join(entry.ends)
        python = entry.python if tried else ""
        cells = f"{entry.package} | `{entry.promised}` | {entry.version} | {end} | {python} | {numbers} | {entry.date}"
        lines.append(f"| {cells} | {result(entry)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(lines)


def with_table(page: str, text: str) -> str:
    """The page with this table between its marks.

    Raises:
        DataError: it lacks a mark.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise DataError(f"{PAGE} lacks a mark of the table: write {BEGIN} and {END} where it belongs")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def write_page() -> None:
    """Write the table of the newest record into the page."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(newest())), encoding="utf-8")
