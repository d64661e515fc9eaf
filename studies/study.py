"""A study: its plan, resolved into runs."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from exgrpo.train.common.errors import ConfigError, os_errors_as
from exgrpo.train.common.plain import parse_yaml
from exgrpo.train.config.options import Config
from exgrpo.train.config.recipe import merged, read_recipe, recipe_path, validate
from exgrpo.train.config.section import explain, flat
from exgrpo.train.run.startup_checks import check_method
from studies.climb import Choice, Climb, climb
from studies.plan import StudyPlan
from studies.sources import by_source, found_from

NO_PART = ("output.", "checkpoint.", "resume", "reward.workers")
"""Prefixes of options that do not change what a run computes."""


@dataclass(frozen=True)
class Planned:
    """A run that a study needs.

    Attributes:
        task: name of the task.
        arm: name of the arm.
        seed: seed of the run.
        chosen: values that the arm tries or has chosen.
        config: configuration without output folder.
        key: hash of what the run computes, the same for equal runs of all studies.
    """

    task: str
    arm: str
    seed: int
    chosen: Mapping[str, Any]
    config: Config
    key: str


Counted = dict[tuple[str, str], list[Planned] | None]
"""Final runs by task and arm; None: the arm has not chosen yet."""
Trials = list[tuple[Choice, list[Planned]]]
"""Choices of an arm on a task, with the runs that evaluate them."""
Height = Callable[[str], float | None]
"""Score of the run with a key; None: it has not been run."""


@dataclass(frozen=True)
class Study:
    """A plan, and the path of its file."""

    path: Path
    plan: StudyPlan
    _resolved: dict[str, Planned] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Name of the file, without its suffix."""
        return self.path.stem

    def only(self, tasks: Sequence[str] = (), arms: Sequence[str] = ()) -> "Study":
        """Return the study with some of its tasks and arms (empty: all); raise ConfigError for unknown ones."""
        parts: dict[str, Any] = {}
        for name, wanted, of in (("tasks", tasks, self.plan.tasks), ("arms", arms, self.plan.arms)):
            if unknown := set(wanted) - of.keys():
                raise ConfigError(f"--{name} {', '.join(sorted(unknown))}: {self.path} has {', '.join(of)}")
            parts[name] = {one: of[one] for one in of if not wanted or one in wanted}
        return Study(self.path, self.plan.model_copy(update=parts))

    def planned(self, task: str, arm: str, seed: int, chosen: Mapping[str, Any]) -> Planned:
        """Return a run; raise ConfigError if a recipe or an option of it is wrong."""
        name = json.dumps([task, arm, seed, dict(chosen)])
        if name not in self._resolved:
            self._resolved[name] = self._resolve(task, arm, seed, chosen)
        return self._resolved[name]

    def _resolve(self, task: str, arm: str, seed: int, chosen: Mapping[str, Any]) -> Planned:
        plan = self.plan
        parts = (plan.tasks[task], plan.arms[arm])
        recipes = [recipe_path(Path(name), self.path.parent) for part in parts for name in part.recipes]
        layers = [read_recipe(recipe) for recipe in recipes]
        settings = [plan.settings, *(part.settings for part in parts), dict(chosen), {"seed": seed}]
        origin = f"{self.path}, arm {arm} on {task}"
        values = merged(*layers, *(found_from(layer, self.path.parent) for layer in settings))
        config = validate(values, origin)
        if budget := plan.budget_of(seed):
            config = validate(merged(values, budget.options(config, plan.arms[arm].asks)), origin)
        samples = config.evaluation.samples
        if config.data.test is None or samples < 2 or samples.bit_count() > 1:
            raise ConfigError(
                f"{origin}: a study compares Pass@1 and Pass@k of held-out questions: set data.test, and "
                "evaluation.samples to 2, 4, 8 or another power of 2"
            )
        return Planned(task, arm, seed, chosen, config, key_of(config))

    def searched(self, task: str, arm: str, height: Height) -> tuple[Trials, Climb]:
        """Return an arm's trials on a task, and the state of its search; without `trials`, all choices at once."""
        search, lines = self.plan.search, self.plan.lines_of(arm)
        if search is None:
            return [], Climb([], {})
        if search.trials is None:
            choices = [dict(zip(lines, values, strict=True)) for values in itertools.product(*lines.values())]
            trials = [(one, [self.planned(task, arm, seed, one) for seed in search.seeds]) for one in choices]
            heights = [_heights(runs, height) for _, runs in trials]
            known = [np.mean(of) for of in heights if of is not None]
            return trials, Climb(choices, choices[int(np.argmax(known))] if len(known) == len(choices) else None)
        needed: dict[str, tuple[Choice, dict[str, Planned]]] = {}

        def runs_of(choice: Choice, seeds: Sequence[int]) -> list[Planned]:
            runs = [self.planned(task, arm, seed, choice) for seed in seeds]
            _, of_choice = needed.setdefault(json.dumps(choice), (choice, {}))
            of_choice.update({run.key: run for run in runs})
            return runs

        def beats(one: Choice, other: Choice) -> bool | None:
            for count in range(1, len(search.seeds) + 1):
                ours, theirs = (_heights(runs_of(of, search.seeds[:count]), height) for of in (one, other))
                if ours is None or theirs is None:
                    return None
                if np.mean(ours) <= np.mean(theirs):
                    return False
            return True

        starts = self.starts(task, arm)
        found = climb(starts, lines, self.plan.trials_of(arm, 0), beats, self._possible(task, arm))
        return [(choice, list(runs.values())) for choice, runs in needed.values()], found

    def starts(self, task: str, arm: str) -> list[Choice]:
        """Return the starting values of an arm's search, its own ones first.

        Raise ConfigError if one is not among the searched values, or there are more than trials.
        """
        own = flat(self.planned(task, arm, self.plan.seeds[0], {}).config)
        lines = self.plan.lines_of(arm)
        starts = [{**own, **other} for other in ({}, *self.plan.starts_of(arm))]
        for start, (name, values) in itertools.product(starts, lines.items()):
            if start.get(name) not in values:
                value = f"is {start[name]}" if name in start else "is no option"
                raise ConfigError(f"{self.path}, arm {arm} on {task}: {name} {value}, none of those searched over")
        if len(starts) > (trials := self.plan.trials_of(arm, len(starts))):
            raise ConfigError(f"{self.path}, arm {arm}: {len(starts)} starts need as many trials, and it has {trials}")
        return [{name: start[name] for name in lines} for start in starts]

    def _possible(self, task: str, arm: str) -> Callable[[Choice], bool]:
        def possible(choice: Choice) -> bool:
            try:
                self.planned(task, arm, self.plan.seeds[0], choice)
            except ConfigError:
                return False
            return True

        return possible

    def chosen(self, task: str, arm: str, height: Height) -> dict[str, Any] | None:
        """Return the values that an arm has chosen on a task; None if a run of its search is missing."""
        return self.searched(task, arm, height)[1].best

    def counted(self, height: Height) -> Counted:
        """Return the final runs by task and arm; None if the arm has not chosen yet."""
        found: Counted = {}
        for task, arm in itertools.product(self.plan.tasks, self.plan.arms):
            chosen = self.chosen(task, arm, height)
            found[task, arm] = (
                None if chosen is None else [self.planned(task, arm, seed, chosen) for seed in self.plan.seeds_of(arm)]
            )
        return found

    def known(self, height: Height) -> Iterator[Planned]:
        """Yield all runs known to be needed, each once, task by task.

        With a search they are ordered by arm, its search first; without one, by seed.
        """
        counted, runs = self.counted(height), []
        for task in self.plan.tasks:
            of_task = [counted[task, arm] or [] for arm in self.plan.arms]
            if self.plan.search is None:
                runs += [run for of_seed in itertools.zip_longest(*of_task) for run in of_seed if run is not None]
                continue
            for arm, of_arm in zip(self.plan.arms, of_task, strict=True):
                trials, _ = self.searched(task, arm, height)
                runs += [*(run for _, of_choice in trials for run in of_choice), *of_arm]
        yield from {run.key: run for run in runs}.values()

    def choices(self, task: str, arm: str) -> list[Choice]:
        """Return the choices to check before the first run: all of them, or the first one and its neighbours."""
        search = self.plan.search
        if search is None or search.trials is None:
            return [choice for choice, _ in self.searched(task, arm, lambda _: None)[0]] or [{}]
        lines, starts = self.plan.lines_of(arm), self.starts(task, arm)
        return [*climb(starts, lines, len(starts) + sum(map(len, lines.values())), lambda *_: False).tried]

    def check(self) -> None:
        """Check that all runs are possible; a ConfigError names arm and task."""
        for task, arm in itertools.product(self.plan.tasks, self.plan.arms):
            for chosen in self.choices(task, arm):
                run = self.planned(task, arm, self.plan.seeds[0], chosen)
                try:
                    check_method(run.config)
                except ConfigError as error:
                    raise ConfigError(f"{self.path}, arm {arm} on {task}: {error}") from None


def _heights(runs: Sequence[Planned], height: Height) -> list[float] | None:
    """Return the scores of runs; None if one has not been done."""
    found = [height(run.key) for run in runs]
    return [one for one in found if one is not None] if None not in found else None


def load_study(path: Path) -> Study:
    """Read a study and check each of its runs, so that errors appear before the first run.

    Raise ConfigError if the file is missing or wrong; the message names the key.
    """
    with os_errors_as(ConfigError, f"{path} cannot be read"):
        if not path.is_file():
            raise ConfigError(f"{path}: no such study")
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        study = Study(path, StudyPlan.model_validate(parse_yaml(text)))
    except ValidationError as error:
        raise ConfigError(explain(error, StudyPlan, str(path))) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    study.check()
    return study


def settings_of(config: Config) -> dict[str, Any]:
    """Return the options that determine what a run computes and are not defaults, by dotted key, as plain values.

    Functions named by their files are identified by a hash; raise ConfigError if a file is missing.
    """
    values = flat(config.model_dump(mode="json", exclude_defaults=True))
    return by_source({name: value for name, value in values.items() if not name.startswith(NO_PART)})


def key_of(config: Config) -> str:
    """Return a short hash of `settings_of`; options added by later versions do not change it."""
    return hashlib.sha256(json.dumps(settings_of(config), sort_keys=True).encode()).hexdigest()[:16]
