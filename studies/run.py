"""`python -m studies.run FILE`: do the missing runs of a study."""

import sys
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from exgrpo.tools.first import RunFailedError, cores
from exgrpo.train.common.durable import claim
from exgrpo.train.common.errors import ExgrpoError, OutputError, os_errors_as
from exgrpo.train.common.process import run_program
from exgrpo.train.config.command_line import options_of
from studies.left import left_of, table_of
from studies.origin import ROOT, Origin
from studies.results import Result, ResultFile
from studies.runner import Run
from studies.statistics import height
from studies.study import Planned, Study, load_study

PROGRAM = "python -m studies.run"
RESULTS = ROOT / "studies" / "results" / "runs.jsonl"
RUNS = Path("runs") / "studies"


class Options(BaseModel):
    """Do the missing runs of a study; a stopped run is resumed.

    `bench` in place of a study compares a method of your own with stored runs: see `bench --help`.
    """

    model_config = ConfigDict(frozen=True)

    study: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")] = Field(description="The study.")
    results: Path = Field(RESULTS, description="File of results of all studies: runs in it are not repeated.")
    runs: Path = Field(RUNS, description="Folder of the runs.")
    plan: bool = Field(False, description="Show what is left, and stop.")
    tasks: tuple[str, ...] = Field((), description="Only the runs on these tasks; none: on all.")
    arms: tuple[str, ...] = Field((), description="Only the runs of these arms; none: of all.")
    workers: int = Field(2, ge=1, description="Runs at a time, each on a core of its own.")


@dataclass
class StudyWork:
    """Execution of a study's runs.

    Attributes:
        study: the study.
        results: stored results.
        options: options of the program.
        origin: origin of new results.
        going: current runs.
        failed: errors of failed runs, by key.
    """

    study: Study
    results: ResultFile
    options: Options
    origin: Origin
    going: dict[Future[Result | None], Run] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def waiting(self) -> list[Planned]:
        """Return the runs known to be needed that have not been started, in order."""
        begun = {run.planned.key for run in self.going.values()} | set(self.failed) | set(self.results.by_key)
        return [run for run in self.study.known(self.height) if run.key not in begun]

    def height(self, key: str) -> float | None:
        """Return the score of a run for the search; None if it has no result."""
        return height(self.results.by_key.get(key))

    def do(self, progress: Progress) -> None:
        """Do all runs."""
        free = cores(self.options.workers)
        bar = progress.add_task(self.study.name, total=None)
        with ThreadPoolExecutor(len(free)) as pool:
            try:
                while (waiting := self.waiting()) or self.going:
                    for planned in waiting[: len(free)]:
                        run = Run(planned, self.options.runs, free.pop(0))
                        self.going[pool.submit(run.result, self.origin)] = run
                    self._show(progress, bar)
                    self._take_in(free)
                self._show(progress, bar)
            except BaseException:
                for run in self.going.values():
                    run.stop()
                raise

    def _show(self, progress: Progress, bar: TaskID) -> None:
        left = left_of(self.study, self.results, self.height)
        words = left.time(self.options.workers)
        progress.update(bar, total=left.done + left.left, completed=left.done, description=words)

    def _take_in(self, free: list[int]) -> None:
        for future in wait(self.going, return_when=FIRST_COMPLETED).done:
            run = self.going.pop(future)
            free.append(run.core)
            try:
                result = future.result()
            except ExgrpoError as error:
                self.failed[run.planned.key] = (
                    f"{run.planned.arm} on {run.planned.task}, seed {run.planned.seed}: {error}"
                )
                continue
            if result is not None:
                self.results.add(result)
                run.tidy()


def do(study: Study, results: ResultFile, options: Options, resources: ExitStack) -> None:
    """Print the runs left of a study, and do them; raise an ExgrpoError if one fails or a folder cannot be written."""
    console = Console()
    todo = StudyWork(study, results, options, Origin.here())
    console.print(table_of(study, left_of(study, results, todo.height), options.workers))
    if options.plan:
        return
    with os_errors_as(OutputError, f"{options.runs} cannot be written"):
        options.runs.mkdir(parents=True, exist_ok=True)
    resources.enter_context(claim(options.runs))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        todo.do(progress)
    if todo.failed:
        raise RunFailedError("; ".join(todo.failed.values()))


def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit status."""
    if argv and argv[0] == "bench":
        bench: int = import_module("studies.bench").main(argv[1:])
        return bench

    def work(resources: ExitStack) -> None:
        options = options_of(Options, PROGRAM, argv)
        study = load_study(options.study).only(options.tasks, options.arms)
        do(study, ResultFile(options.results), options, resources)

    return run_program(work, "stopped: the same command resumes it")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
