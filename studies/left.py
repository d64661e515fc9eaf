"""What a study has done, what is left, and how long that will take."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from studies.results import ResultFile
from studies.study import Height, Study

START_SECONDS = 8.0
"""Of a run besides training and evaluation."""


@dataclass(frozen=True)
class Left:
    """Counts of runs, searches included.

    Attributes:
        of: by arm and task: runs done, and runs in all; of a search by trials one run for each that is left.
        seconds: that the runs need which are left on tasks with a run that has ended, added up.
        unknown: runs left on other tasks.
    """

    of: Mapping[tuple[str, str], tuple[int, int]]
    seconds: float
    unknown: int

    @property
    def done(self) -> int:
        """Runs that are done."""
        return sum(done for done, _ in self.of.values())

    @property
    def left(self) -> int:
        """Runs that are not."""
        return sum(of - done for done, of in self.of.values())

    def time(self, workers: int) -> str:
        """What is left, in words, with so many runs at a time."""
        if self.unknown and not self.seconds:
            return "time left not known yet"
        minutes = self.seconds / 60 / workers
        words = f"about {minutes:.0f} min left" if minutes < 120 else f"about {minutes / 60:.1f} h left"
        return f"more than {words}" if self.unknown else words


def left_of(study: Study, results: ResultFile, height: Height) -> Left:
    """Count what is left of a study; a run that is left takes the mean time of those on its task."""
    counts, seconds, unknown = {}, 0.0, 0
    spent: dict[str, list[float]] = {task: [] for task in study.plan.tasks}
    for run in study.known(height):
        if run.key in results.by_key:
            spent[run.task].append(results.by_key[run.key].seconds + START_SECONDS)
    for (task, arm), counted in study.counted(height).items():
        trials, search = study.searched(task, arm, height)
        keys = [run.key for _, runs in trials for run in runs] + [run.key for run in counted or ()]
        unseen = study.plan.trials_of(arm, len(search.tried)) - len(search.tried) if search.best is None else 0
        total = sum(len(runs) for _, runs in trials) + unseen + len(study.plan.seeds_of(arm))
        done = sum(key in results.by_key for key in keys)
        counts[arm, task] = (done, total)
        if spent[task]:
            seconds += (total - done) * float(np.mean(spent[task]))
        else:
            unknown += total - done
    return Left(counts, seconds, unknown)


def table_of(study: Study, left: Left, workers: int) -> Table:
    """The counts as a table to print."""
    table = Table(caption=f"{left.done} of {left.done + left.left} runs are done, {left.time(workers)}")
    table.add_column("arm")
    for task in study.plan.tasks:
        table.add_column(task, justify="right")
    for arm in study.plan.arms:
        table.add_row(arm, *("{} of {}".format(*left.of[arm, task]) for task in study.plan.tasks))
    return table
