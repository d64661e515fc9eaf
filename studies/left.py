"""Progress of a study: runs done, runs left, and the expected time."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from studies.results import ResultFile
from studies.study import Height, Study

START_SECONDS = 8.0  # of a run, in addition to training and evaluation


@dataclass(frozen=True)
class Left:
    """Counts of runs, searches included.

    Attributes:
        of: runs done and runs in total, by arm and task; a remaining trial of a search counts as one run.
        seconds: expected total time of the runs left on tasks with a finished run.
        unknown: runs left on other tasks.
    """

    of: Mapping[tuple[str, str], tuple[int, int]]
    seconds: float
    unknown: int

    @property
    def done(self) -> int:
        """Number of runs done."""
        return sum(done for done, _ in self.of.values())

    @property
    def left(self) -> int:
        """Number of runs left."""
        return sum(of - done for done, of in self.of.values())

    def time(self, workers: int) -> str:
        """Describe the remaining time with this many workers."""
        if self.unknown and not self.seconds:
            return "time left not known yet"
        minutes = self.seconds / 60 / workers
        words = f"about {minutes:.0f} min left" if minutes < 120 else f"about {minutes / 60:.1f} h left"
        return f"more than {words}" if self.unknown else words


def left_of(study: Study, results: ResultFile, height: Height) -> Left:
    """Count the runs left of a study; each takes the mean time of the runs on its task."""
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
    """Format the counts as a table."""
    table = Table(caption=f"{left.done} of {left.done + left.left} runs are done, {left.time(workers)}")
    table.add_column("arm")
    for task in study.plan.tasks:
        table.add_column(task, justify="right")
    for arm in study.plan.arms:
        table.add_row(arm, *("{} of {}".format(*left.of[arm, task]) for task in study.plan.tasks))
    return table
