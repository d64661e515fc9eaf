"""What the checks have found, as a table for the console and as a text for others to read."""

import getpass
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

import exgrpo
from exgrpo.train.doctor.check import Finding
from exgrpo.train.doctor.machine import hardware, versions

COLOURS = {"ok": "green", "failed": "bold red", "skipped": "yellow"}
_PATH = re.compile(r"(?<![\w./<>~:…-])/(?!usr/|proc/|sys/|dev/|lib)(?:[\w.+@-]+/){1,}([\w.+@-]+)")
"""An absolute path with a folder in it, except for those of every Linux system."""
_FENCE = "```"


def table(findings: Sequence[Finding]) -> Table:
    """A row for each check."""
    rows = Table("check", "result", "found", "seconds", show_lines=False)
    rows.columns[0].no_wrap = rows.columns[1].no_wrap = True
    rows.columns[2].overflow = "fold"
    rows.columns[3].justify = "right"
    for found in findings:
        result = f"[{COLOURS[found.result]}]{found.result}[/]"
        rows.add_row(found.name, result, found.text.replace("[", r"\["), f"{found.seconds:.1f}")
    return rows


def verdict(findings: Sequence[Finding]) -> str:
    """How many checks came to what, in a line."""
    counts = Counter[str](found.result for found in findings)
    return ", ".join(f"{counts[result]} {result}" for result in COLOURS)


def text(findings: Sequence[Finding], scratch: Path) -> str:
    """What to paste into a report, in Markdown: versions, hardware, the checks, the last output of those that failed.

    Args:
        findings: of the checks.
        scratch: the folder of temporary files.
    """
    lines = [f"# exgrpo doctor: {verdict(findings)}", ""]
    lines += [", ".join(f"{name} {number}" for name, number in versions().items()), ""]
    lines += [f"- {line}" for line in hardware()]
    lines += ["", "| check | result | found | seconds |", "|---|---|---|---:|"]
    for found in findings:
        cell = " ".join(found.text.split()).replace("|", r"\|")
        lines.append(f"| {found.name} | {found.result} | {cell} | {found.seconds:.1f} |")
    for found in findings:
        if found.output:
            lines += ["", f"Last output of {found.name}:", "", _FENCE, *found.output, _FENCE]
    return anonymous("\n".join(lines), scratch) + "\n"


def anonymous(content: str, scratch: Path) -> str:
    """A text without what names a user: known folders by signs, other paths cut to their last part, no host or user."""
    folders = {
        os.getcwd(): ".",
        str(scratch): "<scratch>",
        str(Path(exgrpo.__file__).parents[1]): "<source>",
        sys.prefix: "<python>",
        str(Path.home()): "~",
    }
    for folder in sorted(folders, key=len, reverse=True):
        if folder != "/" and not folder.startswith("/usr"):
            content = re.sub(rf"{re.escape(folder)}(?![\w-])", folders[folder], content)
    content = _PATH.sub(r"…/\1", content)
    for name, sign in ((socket.gethostname(), "<host>"), (_user(), "<user>")):
        if len(name) > 2 and name not in ("localhost", "root"):
            content = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", sign, content)
    return content


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # of a number without a name
        return ""
