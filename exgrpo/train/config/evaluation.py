"""Options of a run's evaluations and of their sets of held-out questions."""

from typing import Annotated

import tyro
from pydantic import AfterValidator, Field

from exgrpo.train.common.limits import MOST_ROWS, MOST_SAMPLES, MOST_STEPS
from exgrpo.train.config.section import Section, Sources, Temperature, TopP

TEST = "test"
"""Name of the set of data.test."""
SAMPLED = ("samples", "temperature", "top_p")
"""Sampling options of held-out questions: in this section for runs, in `rollout` for exgrpo evaluate."""
HEADINGS = (
    *(TEST, "held_out", "pass_at", "distinct_at", "seconds", "tokens", "tokens_per_second", "mfu"),
    *("reward", "reward_part", "bucket", "mismatch", "correction", "fresh_log_ratio", "replayed_log_ratio", "train"),
)
"""Prefixes of other metrics in metrics.jsonl and in trackers, which no set may have as its name."""


def _no_heading(name: str) -> str:
    if name in HEADINGS:
        raise ValueError(f"the set {name!r} needs another name: other numbers of metrics.jsonl begin with {name}/")
    return name


SetName = Annotated[str, Field(pattern="^[A-Za-z][A-Za-z0-9_]*$", max_length=64), AfterValidator(_no_heading)]
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]


class HeldOutSet(Section):
    """Named set of held-out questions; None takes the value of the option in the field's description."""

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
        description="End the run after so many evaluations in a row without a better checkpoint.best; None: never.",
    )
    sets: Annotated[dict[SetName, HeldOutSet], tyro.conf.Suppress] = Field(
        default_factory=dict, description="In recipes: further sets of held-out questions, by name."
    )
