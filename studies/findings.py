"""Statistics of a study's runs, by arm and task."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from exgrpo.train.common.errors import ReportError
from studies.plan import Claim
from studies.results import Result, ResultFile
from studies.statistics import (
    FloatArray,
    Interval,
    area,
    best,
    break_even,
    cost_ratio,
    difference,
    final,
    height,
    improvement,
    interval_of,
    prices,
)
from studies.study import Planned, Study

Value = Callable[[Result], float]
SCORES = {"pass_at_1": "Pass@1", "pass_at_k": "Pass@{k}", "distinct_at_k": "distinct@{k}"}
"""Names of the score curves."""


@dataclass(frozen=True, eq=False)
class Arm:
    """The runs of an arm.

    Attributes:
        name: name of the arm.
        runs: one per seed, by task.
        chosen: values chosen by its search, by task.
        cut: tasks on which the trials were used up before the search ended.
        seeds: seeds of the runs, in order.
    """

    name: str
    runs: Mapping[str, Sequence[Result]]
    chosen: Mapping[str, Mapping[str, Any]]
    cut: Sequence[str]
    seeds: Sequence[int]

    def values(self, value: Value, tasks: Sequence[str]) -> list[FloatArray]:
        """Return a value of each run, by task."""
        return [np.array([value(run) for run in self.runs[task]]) for task in tasks]


@dataclass(frozen=True, eq=False)
class Findings:
    """The arms of a study, the baseline first, with the seeds that have been run on all tasks.

    Attributes:
        study: the study.
        arms: arms with at least one seed.
        missing: names of the other arms.
    """

    study: Study
    arms: Sequence[Arm]
    missing: Sequence[str]

    @classmethod
    def of(cls, study: Study, results: ResultFile) -> "Findings":
        """Collect stored results; raise ReportError if no seed of the baseline has been run on all tasks."""
        plan = study.plan
        names = sorted(plan.arms, key=lambda name: name != plan.baseline)
        arms = [arm for name in names if (arm := arm_of(study, name, results.by_key))]
        missing = [name for name in names if name not in {arm.name for arm in arms}]
        if plan.baseline in missing:
            raise ReportError(
                f"{study.path}: no seed of the baseline, {plan.baseline}, has been run on all tasks: "
                f"python -m studies.run {study.path}"
            )
        return cls(study, arms, missing)

    @property
    def baseline(self) -> Arm:
        """The arm that the others are compared with."""
        return self.arms[0]

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks."""
        return list(self.study.plan.tasks)

    @property
    def samples(self) -> int:
        """k, the number of answers per held-out question."""
        run = self.baseline.runs[self.tasks[0]][0]
        return int(run.settings.get("evaluation.samples", 1))

    def score_name(self, name: str) -> str:
        """Return the display name of a curve of `SCORES`."""
        return SCORES[name].format(k=self.samples)

    def at_the_end(self, arm: Arm, name: str, tasks: Sequence[str]) -> Interval:
        """Return the interquartile mean of a curve's final values."""
        return interval_of(arm.values(lambda run: final(run, name), tasks))

    def at_the_best(self, arm: Arm, name: str, tasks: Sequence[str]) -> Interval:
        """Return the interquartile mean of a curve's highest values."""
        return interval_of(arm.values(lambda run: best(run, name), tasks))

    def area(self, arm: Arm, name: str, tasks: Sequence[str]) -> Interval:
        """Return the interquartile mean of a curve's mean heights over the steps."""
        return interval_of(arm.values(lambda run: area(run, name), tasks))

    def gain(self, arm: Arm, name: str, tasks: Sequence[str]) -> Interval:
        """Return the mean difference to the baseline at the end."""
        return self._against(difference, arm, lambda run: final(run, name), tasks)

    def chance(self, arm: Arm, name: str, tasks: Sequence[str]) -> Interval:
        """Return the probability of improvement over the baseline at the end."""
        return self._against(improvement, arm, lambda run: final(run, name), tasks)

    def gain_at(self, cost: str, share: float, arm: Arm, name: str, tasks: Sequence[str]) -> Interval:
        """Return the mean difference to the baseline at a share of the common cost, see `shared`."""
        return difference(*self.values_at(cost, share, arm, name, tasks))

    def values_at(
        self, cost: str, share: float, arm: Arm, name: str, tasks: Sequence[str]
    ) -> tuple[list[FloatArray], list[FloatArray]]:
        """Return values of an arm and of the baseline at that cost, per run and task."""
        spent = {task: share * self.shared(cost, arm, task) for task in tasks}
        ours, theirs = (
            [
                np.array([np.interp(spent[task], run.curves[cost], run.curves[name]) for run in of.runs[task]])
                for task in tasks
            ]
            for of in (arm, self.baseline)
        )
        return ours, theirs

    def shared(self, cost: str, arm: Arm, task: str) -> float:
        """Return the largest cost that all runs of an arm and of the baseline reach."""
        return min(float(run.curves[cost][-1]) for of in (arm, self.baseline) for run in of.runs[task])

    def cost_ratio(self, arm: Arm, cost: str, task: str) -> Interval:
        """Return the arm's cost to reach the baseline's final Pass@1, relative to the baseline's total cost."""
        return cost_ratio(arm.runs[task], self.baseline.runs[task], cost)

    def break_even(self, arm: Arm, task: str) -> Interval:
        """Return the ratio from which the arm saves time; see `statistics.break_even`."""
        return break_even(arm.runs[task], self.baseline.runs[task])

    def prices(self, task: str) -> FloatArray:
        """Return the seconds per generated token, per trained token and per step in the runs of all arms."""
        return prices([run for arm in self.arms for run in arm.runs[task]])

    def spent(self, arm: Arm, cost: str, task: str) -> float:
        """Return the mean cost of a whole run."""
        return float(np.mean([run.curves[cost][-1] for run in arm.runs[task]]))

    def _against(
        self,
        compare: Callable[[Sequence[FloatArray], Sequence[FloatArray]], Interval],
        arm: Arm,
        value: Value,
        tasks: Sequence[str],
    ) -> Interval:
        return compare(arm.values(value, tasks), self.baseline.values(value, tasks))

    def of_claim(self, claim: Claim) -> Interval | None:
        """Return the runs' evidence on a claim over all tasks; None if an arm is missing."""
        arms = {arm.name: arm for arm in self.arms}
        if claim.arm not in arms or (claim.against or claim.arm) not in arms:
            return None
        if claim.against is None:
            return interval_of(
                arms[claim.arm].values(lambda run: float(np.nanmean(run.curves[claim.curve])), self.tasks)
            )
        ours, theirs = (
            arms[name].values(lambda run: final(run, claim.curve), self.tasks) for name in (claim.arm, claim.against)
        )
        return difference(ours, theirs)


def arm_of(study: Study, name: str, done: Mapping[str, Result]) -> Arm | None:
    """Return an arm with the seeds that have been run on all tasks; None if there are none."""
    planned: dict[str, dict[int, Planned]] = {}
    cut = []
    for task in study.plan.tasks:
        _, search = study.searched(task, name, lambda key: height(done.get(key)))
        if search.best is None:
            return None
        runs = [study.planned(task, name, seed, search.best) for seed in study.plan.seeds_of(name)]
        planned[task] = {run.seed: run for run in runs if run.key in done}
        cut += [task] * search.cut
    seeds = [seed for seed in study.plan.seeds_of(name) if all(seed in runs for runs in planned.values())]
    if not seeds:
        return None
    found = {task: [done[of_task[seed].key] for seed in seeds] for task, of_task in planned.items()}
    return Arm(name, found, {task: of_task[seeds[0]].chosen for task, of_task in planned.items()}, cut, seeds)
