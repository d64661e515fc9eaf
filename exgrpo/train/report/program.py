"""The report of one or several runs: `python -m exgrpo.train.report RUN [RUN ...] [--output FILE | --follow]`."""

from pathlib import Path
from typing import Annotated

import tyro
from pydantic import BaseModel, ConfigDict, Field

from exgrpo.train.command_line import options_of
from exgrpo.train.errors import ConfigError, ExgrpoError, print_error
from exgrpo.train.report.follow import ADDRESS, open_server
from exgrpo.train.report.page import write_report

PROGRAM = "python -m exgrpo.train.report"


class Options(BaseModel):
    """Write a report about runs as one HTML page, or follow them on one."""

    model_config = ConfigDict(frozen=True)

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = Field(description="Folders of runs.")
    output: Path | None = Field(
        None, description="The page; RUN/report.html where there is one run, else report.html in the current folder."
    )
    follow: bool = Field(
        False, description="Write no page: serve one to this machine, which takes new steps while the runs go on."
    )
    port: int | None = Field(
        None, ge=0, le=65535, description="Of the page with --follow; 0 or none: any that is free."
    )


def main(argv: list[str]) -> int:
    """Run the program; returns its exit status."""
    try:
        options = options_of(Options, PROGRAM, argv)
        if options.follow:
            return _follow(options)
        if options.port is not None:
            raise ConfigError("--port is that of a page which is followed: give --follow with it")
        single = options.runs[0] if len(options.runs) == 1 else Path()
        output = options.output or single / "report.html"
        write_report(options.runs, output)
    except ExgrpoError as error:
        return print_error(error)
    print(f"report in {output}")
    return 0


def _follow(options: Options) -> int:
    if options.output is not None:
        raise ConfigError("--output: with --follow, no page is written; leave one of the two out")
    try:
        with open_server(options.runs, options.port or 0) as server:
            print(f"the report is at http://{ADDRESS}:{server.server_port}/ until Ctrl-C", flush=True)
            server.serve_forever()
    except KeyboardInterrupt:
        print("the report is not served any more")
    return 0
