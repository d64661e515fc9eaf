"""The record of what was tried, docs/compatibility/DATE.json: its table, and whether it has what is promised.

The program tries versions of packages and writes their entries. Those of processors, GPUs and Triton are written into
the newest record by hand, and a new record takes them over.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.compatibility.promises import PACKAGES, ROOT, lowest, range_of

FOLDER = ROOT / "docs" / "compatibility"
PAGE = FOLDER.with_suffix(".md")
BEGIN, END = "<!-- the table: python -m tests.compatibility --table -->", "<!-- the end of the table -->"
HEADER = ("what", "version", "allowed", "state", "date", "what was tried")
BY_HAND = ("processor", "GPU", "triton")
"""What stands in the place of a package in entries that are written by hand: the first rows of the table."""
MEND = "python -m tests.compatibility --only {name}; python -m tests.compatibility --table"


@dataclass(frozen=True)
class Counts:
    """What came of tests: the fields of an `Entry` with these names."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    first_failure: str = ""

    def __add__(self, other: "Counts") -> "Counts":
        """Both together, in this order."""
        names = ("passed", "failed", "skipped", "seconds")
        *numbers, seconds = (getattr(self, name) + getattr(other, name) for name in names)
        return Counts(*numbers, round(seconds, 1), self.first_failure or other.first_failure)


@dataclass(frozen=True)
class Entry:
    """One version or machine that was tried, or not.

    Attributes:
        package: its name in pyproject.toml, or "python", or one of `BY_HAND`.
        version: that which was asked for, or what the processor or the GPU is.
        python: the version of Python that tried it.
        promised: the range of pyproject.toml then.
        ends: which end of the range it is: "oldest", "newest", "between", "latest", "asked for".
        passed, failed, skipped: tests, and imports of modules.
        seconds: of the tests.
        first_failure: what failed first, or empty.
        not_tried: why it was not, or empty.
        predicted: what lets it be expected to work, where only that is known, or empty.
        seen: where somebody has tried it by hand, what, with a link to the record of it; or empty.
        companions: "name==version" of all that pip installed for it.
        date: the day, as YYYY-MM-DD.
    """

    package: str
    version: str
    python: str
    promised: str
    ends: tuple[str, ...]
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    first_failure: str = ""
    not_tried: str = ""
    predicted: str = ""
    seen: str = ""
    companions: tuple[str, ...] = ()
    date: str = ""

    @property
    def works(self) -> bool:
        """Whether it was tried and nothing failed."""
        if self.not_tried or self.predicted or self.first_failure or self.failed:
            return False
        return self.passed > 0 or bool(self.seen)

    @property
    def state(self) -> str:
        """What is known of it, in the words of the table."""
        unknown = "not tried" if self.not_tried else "by prediction only" if self.predicted else "fails"
        return "works" if self.works else unknown

    @property
    def told(self) -> str:
        """What was tried, or why it was not."""
        if by_hand := self.not_tried or self.predicted or self.seen:
            return by_hand
        counts = {"tests": self.passed, "skipped": self.skipped, "failed": self.failed}
        failure = f": `{self.first_failure.replace('|', '/').replace('`', '')}`" if self.first_failure else ""
        listed = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
        return f"{' and '.join(self.ends)}, Python {self.python}: {listed}{failure}"

    @property
    def key(self) -> tuple[str, str]:
        """What a record has once."""
        return self.package, self.version


def read(path: Path) -> list[Entry]:
    """The entries of a record; none where it is not there."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["entries"]
    return [Entry(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in rows]


def write(path: Path, entries: list[Entry]) -> None:
    """Write a record whole, so that a program that is stopped leaves one that can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps({"entries": [asdict(entry) for entry in entries]}, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def newest(folder: Path = FOLDER) -> Path:
    """The newest record."""
    return max(folder.glob("????-??-??.json"))


def table(path: Path) -> str:
    """The lines of the table of a record."""
    rows = [HEADER, ("---",) * len(HEADER)]
    order = [*BY_HAND, *(package.name for package in PACKAGES)]

    def place(entry: Entry) -> tuple[int, Version]:
        return order.index(entry.package), Version("0" if entry.package in BY_HAND else entry.version)

    for entry in sorted(read(path), key=place):
        allowed = f"`{entry.promised}`" if entry.promised else ""
        rows.append((entry.package, entry.version, allowed, entry.state, entry.date, entry.told))
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows]
    return "\n".join([f"The record is [{path.name}](compatibility/{path.name}).", "", *lines])


def with_table(page: str, text: str) -> str:
    """The page with this table between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}"


def problems(entries: list[Entry], table: dict[str, Any]) -> list[str]:
    """What is wrong with the newest record, a line each, with the command that mends it.

    Args:
        entries: of the record.
        table: the table `project` of pyproject.toml.
    """
    found = []
    for package in PACKAGES:
        own = [entry for entry in entries if entry.package == package.name]
        lines = _of_range(package.name, range_of(package.name, table), own)
        found += [f"{package.name}: {line}: {MEND.format(name=package.name)}" for line in lines]
    tried = {entry.version for entry in entries if entry.package == "python" and entry.works}
    tried = {version for version in tried if version in range_of("python", table)}
    classified = set(re.findall(r"Python :: (3\.\d+)$", "\n".join(table["classifiers"]), re.MULTILINE))
    found += [f"the classifier of Python {one}: no record says that it works" for one in sorted(classified - tried)]
    known = {entry.version.partition(" ")[0] for entry in entries if entry.package == "GPU" and entry.works}
    makers = set(re.findall(r"^Environment :: GPU :: (\w+)", "\n".join(table["classifiers"]), re.MULTILINE))
    return found + [f"the classifier of {one}: no record says that a GPU of it works" for one in sorted(makers - known)]


def _of_range(name: str, promised: SpecifierSet, entries: list[Entry]) -> list[str]:
    """What is wrong with the entries of one package."""
    current = [entry for entry in entries if SpecifierSet(entry.promised) == promised]
    if not current:
        return [f"the record knows no version of the range {promised}"]
    found = []
    if not any("oldest" in entry.ends and Version(entry.version) == lowest(promised) for entry in current):
        found.append(f"the record lacks the oldest version, {lowest(promised)}")
    inside = [entry for entry in current if Version(entry.version) in promised]
    if not any("newest" in entry.ends for entry in inside):
        found.append(f"the record lacks the newest version of {promised}")
    failed = [entry for entry in inside if not entry.not_tried and not entry.works]
    return found + [f"{entry.version} is allowed and fails" for entry in failed]
