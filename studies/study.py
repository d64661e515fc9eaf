"""A study as it is written: arms, tasks and seeds in one YAML file, resolved into the runs that it needs."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from exgrpo.train.common.errors import ConfigError, UnreadableRecipeError, os_errors_as
from exgrpo.train.common.plain import parse_yaml
from exgrpo.train.config.options import Config
from exgrpo.train.config.recipe import merged, read_recipe, recipe_path, validate
from exgrpo.train.config.section import explain, flat
from exgrpo.train.run.startup_checks import check_method
from studies.results import CURVES
from studies.sources import by_source, found_from

NO_PART = ("output.", "checkpoint.", "resume", "reward.workers")
"""The beginnings of options that say where and how a run is done, not what it computes."""
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Part(BaseModel):
    """What an arm or a task adds to a run.

    Attributes:
        recipes: builtin:NAME, or paths relative to the study's file; later ones win.
        settings: options by name, over those of the recipes.
        text: what the report says of it besides its name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipes: tuple[str, ...] = ()
    settings: dict[str, Any] = {}
    text: str = ""


class ArmPart(Part):
    """What an arm adds to a run.

    Attributes:
        seeds: in place of those of the study: the same arm twice shows what seeds alone do.
    """

    seeds: tuple[Seed, ...] = ()


class Claim(BaseModel):
    """What somebody says about arms, to be held against the runs.

    Attributes:
        text: the claim, and where it is made.
        arm: of which something is said.
        against: the arm that it is compared with; None: the curve is compared with 0.
        sign: 1: the arm is said to be higher, -1: lower.
        curve: of which the claim is; with `against` its end counts, without it its mean over the run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str
    arm: str
    against: str | None = None
    sign: Literal[-1, 1]
    curve: Literal[CURVES] = "pass_at_1"  # type: ignore[valid-type]  # a table, which a type checker cannot read


class Search(BaseModel):
    """What each arm may choose for itself on each task, before the seeds that count.

    Attributes:
        over: values of each option; all combinations are tried.
        seeds: of the runs that are only searched with.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    over: dict[str, tuple[Any, ...]] = Field(min_length=1)
    seeds: tuple[Seed, ...] = Field(min_length=1)

    def choices(self) -> list[dict[str, Any]]:
        """All combinations of values."""
        return [dict(zip(self.over, values, strict=True)) for values in itertools.product(*self.over.values())]


class Plan(BaseModel):
    """The content of a study's file.

    Attributes:
        title: of its page.
        text: the question that it answers.
        settings: options of all runs; what a task or an arm says beats them.
        tasks: by name.
        arms: by name.
        baseline: the arm that the others are compared with.
        seeds: of the runs that count.
        search: what is chosen before.
        claims: to be held against the runs.
        next: what a reader of the page may do then.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    text: str
    settings: dict[str, Any] = {}
    tasks: dict[str, Part] = Field(min_length=1)
    arms: dict[str, ArmPart] = Field(min_length=1)
    baseline: str
    seeds: tuple[Seed, ...] = Field(min_length=1)
    search: Search | None = None
    claims: tuple[Claim, ...] = ()
    next: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _sound(self) -> Self:
        named = {"baseline": self.baseline}
        for number, claim in enumerate(self.claims):
            named |= {f"claims.{number}.arm": claim.arm, f"claims.{number}.against": claim.against or claim.arm}
        for key, name in named.items():
            if name not in self.arms:
                raise ValueError(f"{key} {name!r} is none of the arms, {', '.join(self.arms)}")
        counted = {seed for arm in self.arms for seed in self.seeds_of(arm)}
        if both := counted & set(self.search.seeds if self.search else ()):
            raise ValueError(f"search.seeds and seeds share {sorted(both)}: what is chosen by a seed must not count it")
        return self

    def seeds_of(self, arm: str) -> tuple[int, ...]:
        """The seeds of an arm's runs that count."""
        return self.arms[arm].seeds or self.seeds


@dataclass(frozen=True)
class Planned:
    """A run that a study needs.

    Attributes:
        task: its name.
        arm: its name.
        seed: of the run.
        chosen: what the arm tries or has chosen.
        config: of the run, without its place.
        key: of what the run computes: equal runs of all studies have the same.
    """

    task: str
    arm: str
    seed: int
    chosen: Mapping[str, Any]
    config: Config
    key: str


Counted = dict[tuple[str, str], list[Planned] | None]
"""The runs that count, by task and arm; None: the arm has not chosen yet."""
Height = Callable[[str], float | None]
"""How good the run of a key was; None: it has not been run."""


@dataclass(frozen=True)
class Study:
    """A plan, and the file that it comes from."""

    path: Path
    plan: Plan
    _resolved: dict[str, Planned] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Of the file, without its ending."""
        return self.path.stem

    def planned(self, task: str, arm: str, seed: int, chosen: Mapping[str, Any]) -> Planned:
        """A run.

        Raises:
            ConfigError: a recipe or an option of it is wrong.
        """
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
        config = validate(merged(*layers, *(found_from(layer, self.path.parent) for layer in settings)), origin)
        samples = config.evaluation.samples
        if config.data.test is None or samples < 2 or samples.bit_count() > 1:
            raise ConfigError(
                f"{origin}: a study compares Pass@1 and Pass@k of held-out questions: set data.test, and "
                "evaluation.samples to 2, 4, 8 or another power of 2"
            )
        return Planned(task, arm, seed, chosen, config, key_of(config))

    def searched(self, task: str, arm: str) -> list[tuple[dict[str, Any], list[Planned]]]:
        """Each choice of an arm on a task, and the runs that it is judged by; empty without a search."""
        search = self.plan.search
        if search is None:
            return []
        return [
            (chosen, [self.planned(task, arm, seed, chosen) for seed in search.seeds]) for chosen in search.choices()
        ]

    def chosen(self, task: str, arm: str, height: Height) -> dict[str, Any] | None:
        """What an arm has chosen on a task: the best mean height; None where a run of its search is missing."""
        tried = self.searched(task, arm)
        if not tried:
            return {}
        heights = [[height(run.key) for run in runs] for _, runs in tried]
        if any(one is None for of_choice in heights for one in of_choice):
            return None
        return tried[int(np.argmax(np.mean(np.array(heights, np.float64), axis=1)))][0]

    def counted(self, height: Height) -> Counted:
        """The runs that count, by task and arm; None where the arm has not chosen yet."""
        found: Counted = {}
        for task, arm in itertools.product(self.plan.tasks, self.plan.arms):
            chosen = self.chosen(task, arm, height)
            found[task, arm] = (
                None if chosen is None else [self.planned(task, arm, seed, chosen) for seed in self.plan.seeds_of(arm)]
            )
        return found

    def known(self, height: Height) -> Iterator[Planned]:
        """All runs that are known to be needed, each once: those of the searches, then seed by seed."""
        runs = [
            run
            for task, arm in itertools.product(self.plan.tasks, self.plan.arms)
            for _, of_choice in self.searched(task, arm)
            for run in of_choice
        ]
        counted = [of for of in self.counted(height).values() if of is not None]
        runs += [run for of_seed in itertools.zip_longest(*counted) for run in of_seed if run is not None]
        yield from {run.key: run for run in runs}.values()


def load_study(path: Path) -> Study:
    """Read a study and check each of its runs, so that a mistake shows before the first of them.

    Raises:
        ConfigError: the file is missing or wrong; the message names the key.
    """
    with os_errors_as(UnreadableRecipeError, f"{path} cannot be read"):
        if not path.is_file():
            raise ConfigError(f"{path}: no such study")
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        study = Study(path, Plan.model_validate(parse_yaml(text)))
    except ValidationError as error:
        raise ConfigError(explain(error, Plan, str(path))) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    for task, arm in itertools.product(study.plan.tasks, study.plan.arms):
        for chosen, _ in study.searched(task, arm) or [({}, [])]:
            run = study.planned(task, arm, study.plan.seeds[0], chosen)
            try:
                check_method(run.config)
            except ConfigError as error:
                raise ConfigError(f"{path}, arm {arm} on {task}: {error}") from None
    return study


def settings_of(config: Config) -> dict[str, Any]:
    """What a run computes: the options that are not at their defaults, by dotted key, as plain values.

    Functions that they name by their files have a hash of what these say.

    Raises:
        ConfigError: there is no such file.
    """
    values = flat(config.model_dump(mode="json", exclude_defaults=True))
    return by_source({name: value for name, value in values.items() if not name.startswith(NO_PART)})


def key_of(config: Config) -> str:
    """A short hash of `settings_of`; an option that a later version adds does not change it."""
    return hashlib.sha256(json.dumps(settings_of(config), sort_keys=True).encode()).hexdigest()[:16]
