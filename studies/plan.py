"""What the YAML file of a study says, as models: tasks, arms, budgets, claims and the search."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from exgrpo.train.config.options import Config
from studies.results import CURVES

Seed = Annotated[int, Field(ge=0, lt=2**32)]
Values = Annotated[tuple[Any, ...], Field(min_length=1)]


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
        search: values of options, beside or in place of those of `search.over`.
        starts: beside those of `search.starts`.
        trials: in place of `search.trials`.
        asks: answers that a step generates, divided by questions * rollout.samples: a budget of answers needs it.
    """

    seeds: tuple[Seed, ...] = ()
    search: dict[str, Values] = {}
    starts: tuple[dict[str, Any], ...] = ()
    trials: int | None = Field(None, ge=1)
    asks: float = Field(1.0, gt=0)


class Budget(BaseModel):
    """What a run generates, in place of a number of steps.

    Attributes:
        answers: in all; the steps follow from what a step asks.
        evaluations: after the one before the first step, at equal distances.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    answers: int = Field(ge=1)
    evaluations: int = Field(ge=1)

    def options(self, config: Config, asks: float) -> dict[str, int]:
        """The options that spend it."""
        steps = max(1, round(self.answers / (asks * config.questions * config.rollout.samples)))
        return {"steps": steps, "evaluation.every": math.ceil(steps / self.evaluations)}


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
        over: values of each option, in their order.
        trials: of combinations at most, by `studies.climb` from the arm's own values; None: all are tried.
        starts: values with which a search by trials begins beside the arm's own ones, for all arms.
        seeds: of the runs that are only searched with.
        budget: of these runs; None: that of the others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    over: dict[str, Values] = Field(min_length=1)
    trials: int | None = Field(None, ge=1)
    starts: tuple[dict[str, Any], ...] = ()
    seeds: tuple[Seed, ...] = Field(min_length=1)
    budget: Budget | None = None


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
        budget: of each run, in place of steps.
        search: what is chosen before.
        claims: to be held against the runs.
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
            raise ValueError(f"search.seeds and seeds share {sorted(both)}: what is chosen by a seed must not count it")
        return self

    def seeds_of(self, arm: str) -> tuple[int, ...]:
        """The seeds of an arm's runs that count."""
        return self.arms[arm].seeds or self.seeds

    def budget_of(self, seed: int) -> Budget | None:
        """What a run of a seed generates; None: its settings say that."""
        return (self.search and seed in self.search.seeds and self.search.budget) or self.budget

    def trials_of(self, arm: str, all_of_them: int) -> int:
        """How many choices an arm may try."""
        return (self.search and self.search.trials and (self.arms[arm].trials or self.search.trials)) or all_of_them

    def starts_of(self, arm: str) -> list[dict[str, Any]]:
        """The values with which an arm's search begins beside its own ones."""
        return [*(self.search.starts if self.search else ()), *self.arms[arm].starts]

    def lines_of(self, arm: str) -> dict[str, Values]:
        """The values among which an arm chooses; empty without a search."""
        return {**self.search.over, **self.arms[arm].search} if self.search else {}
