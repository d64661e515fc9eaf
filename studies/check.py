"""`python -m studies.check FILE`: do some runs of a study again, and compare with the results that are there."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import tyro
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.progress import track
from rich.table import Table

from exgrpo.tools.first import cores
from exgrpo.train.common.errors import ExgrpoError, ReportError
from exgrpo.train.common.process import run_program
from exgrpo.train.config.command_line import options_of
from studies.origin import Origin
from studies.results import DIGITS, Result, ResultFile
from studies.run import RESULTS
from studies.runner import Run
from studies.statistics import height
from studies.study import load_study

PROGRAM = "python -m studies.check"
TIMED = ("seconds",)
"""Curves that no two runs have in common."""
EQUAL = 10.0 ** (1 - DIGITS)
"""Numbers that the file rounds are equal if they differ by no more, relative to the larger one."""


class DifferentError(ExgrpoError, RuntimeError):
    """A run came to something else this time."""


class Options(BaseModel):
    """Do some finished runs of a study again, and compare their numbers; those of seconds are left out."""

    model_config = ConfigDict(frozen=True)

    study: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")] = Field(description="The study.")
    results: Path = Field(RESULTS, description="File of results.")
    runs: int = Field(2, ge=1, description="How many runs.")
    seed: int = Field(0, ge=0, description="Decides which.")


def gap(before: Result, after: Result) -> tuple[float, str]:
    """The largest relative difference of two results' curves, and the curve that has it; 0 of what is equal."""
    gaps = {}
    for name in before.curves.keys() - set(TIMED):
        old, new = before.curves[name], after.curves.get(name, np.empty(0))
        if len(old) != len(new) or (np.isnan(old) != np.isnan(new)).any():
            gaps[name] = np.inf
        else:
            scale = np.maximum(np.maximum(np.abs(old), np.abs(new)), np.finfo(np.float64).tiny)
            relative, whole = np.abs(old - new) / scale, (old % 1 == 0) & (new % 1 == 0)  # whole: not rounded
            gaps[name] = float(np.append(0.0, relative[whole | (relative > EQUAL)]).max())
    name = max(gaps, key=gaps.__getitem__)
    return gaps[name], name


def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit status."""

    def work(resources: ExitStack) -> None:
        options = options_of(Options, PROGRAM, argv)
        study, done = load_study(options.study), ResultFile(options.results).by_key
        known = [run for run in study.known(lambda key: height(done.get(key))) if run.key in done]
        if not known:
            raise ReportError(f"{options.results} has no run of {options.study}: python -m studies.run {options.study}")
        rng = np.random.default_rng(options.seed)
        chosen = [known[i] for i in rng.permutation(len(known))[: options.runs]]
        folder = Path(resources.enter_context(TemporaryDirectory()))
        table = Table("run", "commit before", "largest difference", "of")
        different = 0
        for planned in track(chosen, "runs"):
            again = Run(planned, folder, cores(1)[0]).result(Origin.here())
            if again is None:
                return
            # What is compared has been rounded as the file rounds.
            largest, name = gap(done[planned.key], Result.of_line(again.to_line()))
            different += largest > 0
            where = f"{planned.arm} on {planned.task}, seed {planned.seed}"
            table.add_row(where, done[planned.key].commit, f"{largest:.2g}" if largest else "none", name)
        Console().print(table)
        if different:
            raise DifferentError(f"{different} of {len(chosen)} runs came to something else")

    return run_program(work, "stopped: nothing has changed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
