"""The report of one or several runs: `python -m exgrpo.train.report RUN [RUN ...] [--output FILE]`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from exgrpo.train.errors import ExgrpoError, print_error
from exgrpo.train.report.page import write_report


@dataclass(frozen=True)
class Arguments:
    """Write a report about runs as one HTML page."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs."""
    output: Path | None = None
    """The page; RUN/report.html where there is one run, else report.html in the current folder."""


def main(argv: list[str]) -> int:
    """Run the program; returns its exit status."""
    arguments = tyro.cli(Arguments, args=argv, prog="python -m exgrpo.train.report")
    single = arguments.runs[0] if len(arguments.runs) == 1 else Path()
    output = arguments.output or single / "report.html"
    try:
        write_report(arguments.runs, output)
    except ExgrpoError as error:
        return print_error(error)
    print(f"report in {output}")
    return 0
