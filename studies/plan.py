"""The content of a study's YAML file: tasks, arms, budgets, claims and the search."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from exgrpo.train.config.options import Config
from studies.results import CURVES

Seed = Annotated[int, Field(ge=0, lt=2**32)]
Values = Annotated[tuple[Any, ...], Field(min_length=1)]


class Part(BaseModel):
    """Contribution of an arm or a task to a run.

    Attributes:
        recipes: builtin:NAME, or paths relative to the study's file; later ones win.
        settings: options by name, which override the recipes.
        text: description for the report.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipes: tuple[str, ...] = ()
    settings: dict[str, Any] = {}
    text: str = ""


class ArmPart(Part):
    """Contribution of an arm to a run.

    Attributes:
        seeds: replace the study's; the same arm with other seeds shows the effect of seeds alone.
        search: values of options, in addition to or in place of those of `search.over`.
        starts: in addition to `search.starts`.
        trials: replaces `search.trials`.
        asks: answers generated per step, divided by questions * rollout.samples; needed for a budget of answers.
    """

    seeds: tuple[Seed, ...] = ()
    search: dict[str, Values] = {}
    starts: tuple[dict[str, Any], ...] = ()
    trials: int | None = Field(None, ge=1)
    asks: float = Field(1.0, gt=0)


class Budget(BaseModel):
    """Answers that a run generates, in place of a number of steps.

    Attributes:
        answers: total number, from which the number of steps follows.
        evaluations: number of evaluations after the initial one, equally spaced.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    answers: int = Field(ge=1)
    evaluations: int = Field(ge=1)

    def options(self, config: Config, asks: float) -> dict[str, int]:
        """Return the options that spend the budget."""
        steps = max(1, round(self.answers / (asks * config.questions * config.rollout.samples)))
        return {"steps": steps, "evaluation.every": math.ceil(steps / self.evaluations)}


class Claim(BaseModel):
    """A published claim about arms, to be compared with the runs.

    Attributes:
        text: the claim and its source.
        arm: the arm it is about.
        against: the arm that it is compared with; None: the curve is compared with 0.
        sign: 1: the arm is claimed to be higher, -1: lower.
        curve: the curve it is about; with `against` its final value is used, without it its mean over the run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str
    arm: str
    against: str | None = None
    sign: Literal[-1, 1]
    curve: Literal[CURVES] = "pass_at_1"  # type: ignore[valid-type]  # a table, which a type checker cannot read


class Search(BaseModel):
    """Options that each arm chooses on each task, before the final runs.

    Attributes:
        over: values of each option, in order.
        trials: maximum number of combinations tried by `studies.climb` from the arm's own values; None: try all.
        starts: further starting values for all arms, with `trials`.
        seeds: seeds of the search's runs.
        budget: budget of these runs; None: that of the final runs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    over: dict[str, Values] = Field(min_length=1)
    trials: int | None = Field(None, ge=1)
    starts: tuple[dict[str, Any], ...] = ()
    seeds: tuple[Seed, ...] = Field(min_length=1)
    budget: Budget | None = None


class StudyPlan(BaseModel):
    """The content of a study's file.

    Attributes:
        title: title of its page.
        text: the question that it answers.
        settings: options of all runs; tasks and arms override them.
        tasks: by name.
        arms: by name.
        baseline: the arm that the others are compared with.
        seeds: seeds of the final runs.
        budget: budget of each run, in place of steps.
        search: choice of options before the final runs.
        claims: claims to be compared with the runs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    text: str
    settings: dict[str, Any] = {}
    tasks: dict[str, Part] = Field(min_length=1)
    arms: dict[str, ArmPart] = Field(min_length=1)
    baseline: str
    seeds: tuple[Seed, ...] = Field(min_length=1)
    budget: Budget | None = None
    search: Search | None = None
    claims: tuple[Claim, ...] = ()

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
            raise ValueError(f"search.seeds and seeds share {sorted(both)}: use different seeds for search and result")
        return self

    def seeds_of(self, arm: str) -> tuple[int, ...]:
        """Return the seeds of an arm's final runs."""
        return self.arms[arm].seeds or self.seeds

    def budget_of(self, seed: int) -> Budget | None:
        """Return the budget of a run with this seed; None: its settings define the steps."""
        return (self.search and seed in self.search.seeds and self.search.budget) or self.budget

    def trials_of(self, arm: str, all_of_them: int) -> int:
        """Return the number of choices that an arm may try."""
        return (self.search and self.search.trials and (self.arms[arm].trials or self.search.trials)) or all_of_them

    def starts_of(self, arm: str) -> list[dict[str, Any]]:
        """Return further starting values of an arm's search."""
        return [*(self.search.starts if self.search else ()), *self.arms[arm].starts]

    def lines_of(self, arm: str) -> dict[str, Values]:
        """Return the values among which an arm chooses; empty without a search."""
        return {**self.search.over, **self.arms[arm].search} if self.search else {}
