"""Whether a record has what pyproject.toml promises."""

import re
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.compatibility.promises import lowest, range_of
from tests.compatibility.record import Entry
from tests.compatibility.suites import PACKAGES

MEND = "python -m tests.compatibility --only {name}; python -m tests.compatibility --table"


def problems(entries: list[Entry], table: dict[str, Any]) -> list[str]:
    """What is wrong, a line each, with the command that mends it.

    Args:
        entries: of the newest record.
        table: the table `project` of pyproject.toml.
    """
    found = []
    for package in PACKAGES:
        promised = range_of(package.name, table)
        own = [entry for entry in entries if entry.package == package.name]
        found += [f"{line}: {MEND.format(name=package.name)}" for line in of_range(package.name, promised, own)]
    classified = re.findall(r"Python :: (3\.\d+)$", "\n".join(table["classifiers"]), re.MULTILINE)
    promised = range_of("python", table)
    found += [f"the classifier of Python {one} is not in requires-python" for one in classified if one not in promised]
    return found


def of_range(name: str, promised: SpecifierSet, entries: list[Entry]) -> list[str]:
    """What is wrong with the entries of one package."""
    current = [entry for entry in entries if SpecifierSet(entry.promised) == promised]
    if not current:
        return [f"{name}: the record knows no version of the range {promised}"]
    found = []
    if not any("oldest" in entry.ends and Version(entry.version) == lowest(promised) for entry in current):
        found.append(f"{name}: the record lacks the oldest version, {lowest(promised)}")
    if not any("newest" in entry.ends and Version(entry.version) in promised for entry in current):
        found.append(f"{name}: the record lacks the newest version of {promised}")
    failed = [entry for entry in current if not entry.not_tried and not entry.works]
    return found + [
        f"{name}: {entry.version} is allowed and fails" for entry in failed if Version(entry.version) in promised
    ]
