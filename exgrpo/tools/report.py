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


class ReportOptions(BaseModel):
    """Write a report about runs as one HTML page."""

    model_config = ConfigDict(frozen=True)

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = Field(min_length=1, description="Folders of runs.")
    output: Path | None = Field(None, description="The page; None: RUN/report.html of one run, else ./report.html.")


def main(argv: list[str]) -> int:
    """Run the program; return its exit status."""
    try:
        options = options_of(ReportOptions, "python -m exgrpo.tools.report", argv)
        output = options.output or (options.runs[0] if len(options.runs) == 1 else Path()) / "report.html"
        write_report(options.runs, output)
    except ExgrpoError as error:
        return print_error(error)
    print(f"report in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
