"""The record of what was tried: docs/compatibility/DATE.json."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exgrpo.train.errors import DataError

FOLDER = Path(__file__).parents[2] / "docs" / "compatibility"


@dataclass(frozen=True)
class Entry:
    """One version that was tried, or not.

    Attributes:
        package: its name in pyproject.toml, or "python".
        version: that which was asked for.
        python: the version of Python that tried it.
        promised: the range of pyproject.toml then.
        ends: which end of the range it is: "oldest", "newest", "between", "latest", "asked for".
        imported: modules of exgrpo.
        passed, failed, skipped: tests. A module whose import fails is a failed test.
        seconds: of the imports and the tests.
        first_failure: what failed first, or empty.
        not_tried: why it was not, or empty.
        companions: "name==version" of all that pip installed for it.
        date: the day, as YYYY-MM-DD.
    """

    package: str
    version: str
    python: str
    promised: str
    ends: tuple[str, ...]
    imported: int = 0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    first_failure: str = ""
    not_tried: str = ""
    companions: tuple[str, ...] = ()
    date: str = ""

    @property
    def works(self) -> bool:
        """Whether it was tried and nothing failed."""
        return not self.not_tried and not self.first_failure and self.failed == 0 and self.passed > 0

    @property
    def key(self) -> tuple[str, str]:
        """What a record has once."""
        return self.package, self.version


def read(path: Path) -> list[Entry]:
    """The entries of a record; none where it is not there.

    Raises:
        DataError: the file is no record.
    """
    if not path.exists():
        return []
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["entries"]
        return [entry_of(row) for row in rows]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is no record of versions ({error}): delete it and run the program again") from error


def entry_of(row: dict[str, Any]) -> Entry:
    """An entry from its JSON, whose tuples are lists."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return Entry(**values)


def write(path: Path, entries: list[Entry]) -> None:
    """Write a record whole, so that a program that is stopped leaves one that can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps({"entries": [asdict(entry) for entry in entries]}, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def newest(folder: Path = FOLDER) -> Path:
    """The newest record.

    Raises:
        DataError: there is none.
    """
    found = sorted(folder.glob("????-??-??.json"))
    if not found:
        raise DataError(f"{folder} has no record of versions: python -m tests.compatibility")
    return found[-1]
