"""The report of one or several runs: `python -m exgrpo.tools.report RUN [RUN ...] [--output FILE]`."""

import sys
from pathlib import Path
from typing import Annotated

from exgrpo.extras import needs

with needs(__name__, "exgrpo[train]"):
    import tyro
    from pydantic import BaseModel, ConfigDict, Field

    from exgrpo.train.common.errors import ExgrpoError, print_error
    from exgrpo.train.config.command_line import options_of
    from exgrpo.train.metrics.report.page import write_report

PROGRAM = "python -m exgrpo.tools.report"


class Options(BaseModel):
    """Write a report about runs as one HTML page."""

    model_config = ConfigDict(frozen=True)

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = Field(description="Folders of runs.")
    output: Path | None = Field(
        None, description="The page; RUN/report.html where there is one run, else report.html in the current folder."
    )


def main(argv: list[str]) -> int:
    """Run the program; returns its exit status."""
    try:
        options = options_of(Options, PROGRAM, argv)
        single = options.runs[0] if len(options.runs) == 1 else Path()
        output = options.output or single / "report.html"
        write_report(options.runs, output)
    except ExgrpoError as error:
        return print_error(error)
    print(f"report in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
