"""The options of the evaluations of a run, and the sets of held-out questions that it asks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from pydantic import AfterValidator, Field

from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.limits import MOST_ROWS, MOST_SAMPLES, MOST_STEPS
from exgrpo.train.config.section import Section, Sources, Temperature, TopP

if TYPE_CHECKING:
    from exgrpo.train.config.options import Config

TEST = "test"
"""The name of the set that data.test makes."""
SAMPLED = ("samples", "temperature", "top_p")
"""Options that a run has for its held-out questions here, and the program that evaluates in `rollout`."""
HEADINGS = (
    *(TEST, "held_out", "pass_at", "distinct_at", "seconds", "tokens", "tokens_per_second", "mfu"),
    *("reward", "reward_part", "bucket", "mismatch", "correction", "fresh_log_ratio", "replayed_log_ratio", "train"),
)
"""Of other numbers in metrics.jsonl and in trackers."""


def _no_heading(name: str) -> str:
    if name in HEADINGS:
        raise ValueError(f"the set {name!r} needs another name: other numbers of metrics.jsonl begin with {name}/")
    return name


SetName = Annotated[str, Field(pattern="^[A-Za-z][A-Za-z0-9_]*$", max_length=64), AfterValidator(_no_heading)]
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]


class HeldOutSet(Section):
    """Held-out questions with a name; what is None is as in the options that its description names."""

    source: Sources = Field(description="One or several sources of questions, as in data.test.")
    split: str | None = Field(None, description="Split of a hub or builtin data set; None: data.test_split.")
    limit: int | None = Field(
        None, ge=1, le=MOST_ROWS, description="Only the first so many questions of each source; None: data.test_limit."
    )
    samples: Samples | None = Field(None, description="Answers per question; None: evaluation.samples.")
    temperature: Temperature | None = Field(None, description="None: evaluation.temperature.")
    top_p: TopP | None = Field(None, description="None: evaluation.top_p.")


class EvaluationConfig(Section):
    """Held-out Pass@1 before, during and after training, on data.test and on what a recipe names in evaluation.sets."""

    every: int | None = Field(
        20, ge=1, le=MOST_STEPS, description="Evaluate every so many steps; None: before and after only."
    )
    samples: Samples = Field(1, description="Answers per held-out question.")
    temperature: Temperature = Field(1.0, description="Sampling temperature.")
    top_p: TopP = Field(1.0, description="Nucleus sampling; 1 = off.")
    patience: int | None = Field(
        None,
        ge=1,
        le=MOST_STEPS,
        description="End the run when so many evaluations in a row have not improved checkpoint.best; None: never.",
    )
    sets: Annotated[dict[SetName, HeldOutSet], tyro.conf.Suppress] = Field(
        default_factory=dict, description="In recipes: further sets of held-out questions, by name."
    )


@dataclass(frozen=True)
class Asked:
    """How the questions of a set are read and asked; the fields are those of `HeldOutSet`, and none is open."""

    source: tuple[str, ...]
    split: str
    limit: int | None
    samples: int
    temperature: float
    top_p: float


def held_out_sets(config: "Config") -> dict[str, Asked]:
    """All sets of held-out questions of a run by name; that of data.test comes first."""
    data, evaluation = config.data, config.evaluation
    usual: dict[str, Any] = {"split": data.test_split, "limit": data.test_limit}
    usual |= {name: getattr(evaluation, name) for name in SAMPLED}
    sets = {TEST: HeldOutSet(source=data.test)} if data.test else {}
    return {
        name: Asked(**{**usual, **one.model_dump(exclude_none=True)}) for name, one in (sets | evaluation.sets).items()
    }


def check_evaluation(config: "Config") -> None:
    """Whether what goes by a number of the evaluations can have one.

    Raises:
        ConfigError: it cannot.
    """
    if config.evaluation.patience and not (config.checkpoint.best and config.evaluation.every):
        raise ConfigError(
            "evaluation.patience needs checkpoint.best, the number that has to improve, and evaluation.every"
        )
    if config.checkpoint.best and not held_out_sets(config):
        raise ConfigError("checkpoint.best needs held-out questions: set data.test, or evaluation.sets in a recipe")
