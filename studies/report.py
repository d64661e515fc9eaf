"""`python -m studies.report FILE`: tables and one figure of a study."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from exgrpo.train.common.errors import OutputError, os_errors_as
from exgrpo.train.common.process import run_program
from exgrpo.train.config.command_line import options_of
from studies.figure import ROWS, figure
from studies.findings import Findings
from studies.page import table
from studies.results import ResultFile
from studies.run import RESULTS
from studies.study import load_study
from studies.summary import headline, summary

PROGRAM = "python -m studies.report"


class Options(BaseModel):
    """Write the findings of a study as tables in Markdown, and its curves as a figure."""

    model_config = ConfigDict(frozen=True)

    study: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")] = Field(description="The study.")
    results: Path = Field(RESULTS, description="File of results.")
    tasks: tuple[str, ...] = Field((), description="Only these tasks; none: all.")
    arms: tuple[str, ...] = Field((), description="Only these arms and the baseline; none: all.")
    scores: tuple[Literal["pass_at_1", "pass_at_k"], ...] = Field(ROWS, description="Rows of the picture.")
    output: Path | None = Field(
        None, description="Folder of the two files, named as the study; None: that of the results."
    )


def write(findings: Findings, folder: Path, scores: Sequence[str] = ROWS) -> None:
    """Print the findings in short, and write both files; raise OutputError if that fails."""
    Console().print(*summary(findings))
    Console().print(headline(findings), markup=False, highlight=False, soft_wrap=True)
    for ending, text in ((".md", table(findings)), (".svg", figure(findings, scores))):
        path = folder / f"{findings.study.name}{ending}"
        with os_errors_as(OutputError, f"{path} cannot be written"):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        print(path)


def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit status."""

    def work(_: ExitStack) -> None:
        options = options_of(Options, PROGRAM, argv)
        study = load_study(options.study)
        study = study.only(options.tasks, options.arms and (study.plan.baseline, *options.arms))
        write(Findings.of(study, ResultFile(options.results)), options.output or options.results.parent, options.scores)

    return run_program(work, "stopped")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
