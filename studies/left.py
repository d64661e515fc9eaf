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
    """What is left of a study."""
    counts, seconds, unknown = {}, 0.0, 0
    spent_on = {task: _spent(study, results, task, height) for task in study.plan.tasks}
    for (task, arm), counted in study.counted(height).items():
        trials, search = study.searched(task, arm, height)
        searched = [run.key for _, runs in trials for run in runs]
        unseen = study.plan.trials_of(arm, len(search.tried)) - len(search.tried) if search.best is None else 0
        totals = (len(searched) + unseen, len(study.plan.seeds_of(arm)))
        done = [sum(key in results.by_key for key in keys) for keys in (searched, [run.key for run in counted or ()])]
        counts[arm, task] = (sum(done), sum(totals))
        for of, total, spent in zip(done, totals, spent_on[task], strict=True):
            if spent is None:
                unknown += total - of
            else:
                seconds += (total - of) * spent
    return Left(counts, seconds, unknown)


def _spent(study: Study, results: ResultFile, task: str, height: Height) -> tuple[float | None, float | None]:
    """Mean seconds of the runs of a study on a task, in its search and of those that count; None: not known."""
    of: tuple[list[float], list[float]] = ([], [])
    for run in study.known(height):
        if run.task == task and run.key in results.by_key:
            counts = not study.plan.search or run.seed not in study.plan.search.seeds
            of[counts].append(results.by_key[run.key].seconds + START_SECONDS)
    searched, counted = (float(np.mean(some)) if some else None for some in of)
    plan, longer = study.plan, 1.0
    if plan.budget and plan.search and plan.search.budget:
        longer = plan.budget.answers / plan.search.budget.answers
    return searched or (counted and counted / longer), counted or (searched and searched * longer)


def table_of(study: Study, left: Left, workers: int) -> Table:
    """The counts as a table to print."""
    table = Table(caption=f"{left.done} of {left.done + left.left} runs are done, {left.time(workers)}")
    table.add_column("arm")
    for task in study.plan.tasks:
        table.add_column(task, justify="right")
    for arm in study.plan.arms:
        table.add_row(arm, *("{} of {}".format(*left.of[arm, task]) for task in study.plan.tasks))
    return table
