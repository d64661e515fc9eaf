"""`exgrpo train --first [OPTIONS]`: the first result, two runs side by side and one page about both.

Each is an ordinary training run on one core: GRPO without replay, and freshper, each with the settings that the
project's search found best on this task. A stopped run is resumed, and a finished one is not repeated.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from exgrpo.train.checkpoint.resume import AUTO, FINISHED, finished
from exgrpo.train.common.errors import ConfigError, ExgrpoError, OutputError, os_errors_as
from exgrpo.train.common.functions import ASSETS
from exgrpo.train.common.process import end_with_ancestor, leave, run_program
from exgrpo.train.config.options import Config
from exgrpo.train.config.recipe import parse_args
from exgrpo.train.main import configure
from exgrpo.train.main import main as train
from exgrpo.train.metrics.log_files import METRICS, read_records
from exgrpo.train.metrics.report.page import write_report
from exgrpo.train.metrics.report.runs import RunData, group_runs, last, load_run, result

NAME = "first"
RECIPES = ASSETS / NAME
ARMS = ("without_replay", "with_replay")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
LOOK_EVERY = 0.5  # seconds
LAST_LINES = 3
NEXT = "One run of your own is `exgrpo train`: ExGRPO as published. `exgrpo train --help` has all options."


class RunFailedError(ExgrpoError, RuntimeError):
    """A run ended with an error."""


def last_words(log: Path) -> str:
    """Return the last lines that a run has printed, and the path of its log."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LAST_LINES:]
    return f"{' / '.join(lines)} (its output: {log})"


@dataclass(frozen=True)
class Arm:
    """A run: its configuration, and the arguments of the training program."""

    config: Config
    arguments: Sequence[str]

    @classmethod
    def of(cls, name: str, options: Sequence[str]) -> "Arm":
        """Return the run of a recipe with the user's options.

        Raise ConfigError for a wrong option, or if the existing run has other options.
        """
        arguments = [f"--recipe={RECIPES / name}.yaml", *options]
        asked = parse_args(arguments)
        if asked.output.name or asked.resume:
            raise ConfigError("first: it names its runs and goes on with them: leave --output.name and --resume out")
        folder = asked.output.folder / NAME
        arguments += [f"--output.folder={folder}", f"--output.name={name}", f"--resume={AUTO}"]
        try:
            config, _ = configure(arguments)
            finished(config)
        except ConfigError as error:
            raise ConfigError(f"{error}; to begin anew, remove {folder}") from None
        return cls(config, arguments)

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.config.output.folder / str(self.config.output.name)

    @property
    def log(self) -> Path:
        """File with the run's output."""
        return self.folder.with_suffix(".log")

    @property
    def steps(self) -> int:
        """Number of steps done."""
        try:
            records, _ = read_records(self.folder / METRICS)
        except OSError:
            return 0
        return records[-1].step if records else 0


def start(core: int, arguments: Sequence[str], log: Path, folder: Path = Path()) -> subprocess.Popen[bytes]:
    """Start a run on one core, with one thread; it ends with this process.

    Its output is appended to `log`; relative paths in its options start in `folder`.
    """
    command = [sys.executable, "-m", __name__, str(core), str(os.getpid()), *arguments]
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=os.environ | dict.fromkeys(THREADS, "1"),
            start_new_session=True,  # Ctrl-C must reach this process only, which then stops its runs
        )


def cores(wanted: int) -> list[int]:
    """Return up to `wanted` cores that this process may use."""
    return sorted(os.sched_getaffinity(0))[:wanted]


def do(arms: Sequence[Arm], progress: Progress) -> None:
    """Do the unfinished runs side by side. If one fails, stop the others and raise RunFailedError."""
    bars = [progress.add_task(_title(arm.folder), total=arm.config.steps) for arm in arms]
    waiting = [arm for arm in arms if not (arm.folder / FINISHED).exists()]
    free = cycle(cores(len(arms)))
    going = [(arm, start(next(free), arm.arguments, arm.log)) for arm in waiting]
    try:
        while any(process.returncode is None for _, process in going):
            time.sleep(LOOK_EVERY)
            for arm, bar in zip(arms, bars, strict=True):
                progress.update(bar, completed=arm.steps)
            for arm, process in going:
                if process.poll():
                    raise RunFailedError(last_words(arm.log))
    finally:
        for _, process in going:
            process.terminate()
        for _, process in going:
            process.wait()


def table(arms: Sequence[Arm], runs: Sequence[RunData]) -> Table:
    """Return final scores and total costs of the runs."""
    samples = arms[0].config.evaluation.samples
    shown = Table("arm")
    for heading in ("Pass@1", f"Pass@{samples}", "generated tokens", "seconds"):
        shown.add_column(heading, justify="right")
    for run in runs:
        columns = run.columns
        scores = [last(columns, name) for name in ("test/pass_rate", f"pass_at/{samples}")]
        spent = [np.nansum(columns.get(name, np.empty(0))) for name in ("seconds", "seconds/evaluation")]
        shown.add_row(
            _title(Path(run.name)),
            *(f"{score:.3f}" for score in scores),
            f"{last(columns, 'generated_tokens'):,.0f}",
            f"{sum(spent):,.0f}",
        )
    return shown


def _title(folder: Path) -> str:
    return folder.name.replace("_", " ")


def main(options: Sequence[str]) -> int:
    """Do both runs and write the page; return the exit status."""

    def work(_: ExitStack) -> None:
        arms = [Arm.of(name, options) for name in ARMS]
        folder, console = arms[0].folder.parent, Console()
        with os_errors_as(OutputError, f"{folder} cannot be written"):
            folder.mkdir(parents=True, exist_ok=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            do(arms, progress)
        runs = [load_run(arm.folder, arm.folder.name) for arm in arms]
        page = folder.with_suffix(".html")
        write_report([arm.folder for arm in arms], page)
        console.print(table(arms, runs))
        left = f"The curves are in {page}, and the files of the runs are in {folder}."
        for line in (result(group_runs(runs)), left, NEXT):
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    return run_program(work, "stopped: the same command resumes it")


def one(argv: Sequence[str]) -> int:
    """Train as a child of `start`, with arguments `CORE PARENT [ARGUMENTS]`; end when the process PARENT ends."""
    core, parent, *arguments = argv
    os.sched_setaffinity(0, {int(core)})
    end_with_ancestor(int(parent))
    return train(arguments)


if __name__ == "__main__":
    leave(one(sys.argv[1:]))
