"""The imports and the tests in an environment, counted."""

import json
import os
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tests.compatibility.suites import CORE

ROOT = Path(__file__).parents[2]
LIMIT = 7200.0
"""Seconds in which the tests of one version have to end."""


@dataclass(frozen=True)
class Counts:
    """What came of imports and tests: the fields of `record.Entry` with these names."""

    imported: int = 0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    first_failure: str = ""

    def __add__(self, other: "Counts") -> "Counts":
        """Both together, in this order."""
        return Counts(
            self.imported + other.imported,
            self.passed + other.passed,
            self.failed + other.failed,
            self.skipped + other.skipped,
            round(self.seconds + other.seconds, 1),
            self.first_failure or other.first_failure,
        )


@cache
def core(python: Path) -> Counts:
    """The imports and the tests of the core; packages of one environment share them.

    Args:
        python: of the environment.
    """
    done = started([str(python), "-m", "tests.compatibility.imports"])
    return of_imports(done.stdout, done.stderr) + tests(python, CORE)


def tests(python: Path, selection: Sequence[str]) -> Counts:
    """The counts of a selection of tests.

    Args:
        python: of the environment.
        selection: arguments of pytest; none: nothing is counted.
    """
    if not selection:
        return Counts()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="compatibility_tests_") as folder:
        report = Path(folder) / "tests.xml"
        options = ("-q", "-p", "no:cacheprovider", f"--junitxml={report}", f"--basetemp={folder}/tmp")
        try:
            done = started([str(python), "-m", "pytest", *options, *selection])
        except subprocess.TimeoutExpired:
            return Counts(failed=1, first_failure=f"the tests have not ended within {LIMIT:.0f} s")
        # Status 1 is that of tests that failed, which the report has; others mean that pytest itself did.
        counts = of_tests(report.read_text()) if done.returncode in (0, 1) else broken(done.stdout + done.stderr)
    return replace(counts, seconds=round(time.monotonic() - begun, 1))


def started(command: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run a command in the folder of the project, whose modules come first."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )


def of_imports(printed: str, errors: str) -> Counts:
    """What the program of the imports printed, in its last line. A module whose import fails is a failed test."""
    try:
        told = json.loads(printed.splitlines()[-1])
    except (ValueError, IndexError):
        return broken(errors)
    failed = told["failed"]
    return Counts(told["imported"], failed=len(failed), first_failure=shortened("".join(failed[:1])))


def broken(text: str) -> Counts:
    """The counts of a program that did not come to an end."""
    return Counts(failed=1, first_failure=shortened(text.strip().rpartition("\n")[2]) or "it ended without a word")


def of_tests(report: str) -> Counts:
    """The counts of a report of pytest in the form of JUnit."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    wrong = [(case, found) for case in cases for found in case if found.tag in ("failure", "error")]
    failed = len({id(case) for case, _ in wrong})
    skipped = sum(case.find("skipped") is not None for case in cases)
    first = ""
    if wrong:
        case, found = wrong[0]
        first = shortened(f"{case.get('classname')}::{case.get('name')}: {found.get('message')}")
    return Counts(0, len(cases) - skipped - failed, failed, skipped, first_failure=first)


def shortened(text: str) -> str:
    """A line of about 300 characters: its begin names the error, and its end has what a program said last."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:140]} ... {line[-155:]}"
