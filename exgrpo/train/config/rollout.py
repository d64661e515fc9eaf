"""Options of generation, in training and in evaluations: sampling, engines, environments, held-out questions."""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import tyro
from pydantic import AfterValidator, Field

from exgrpo.train.common.functions import Functions
from exgrpo.train.common.limits import (
    LONGEST,
    MOST_KEPT,
    MOST_PROCESSES,
    MOST_ROWS,
    MOST_SAMPLES,
    MOST_STEPS,
    MOST_TOKENS,
)
from exgrpo.train.config.objective import CorrectionConfig
from exgrpo.train.config.section import Section, Sources, StopString, Temperature, TopP

ENVIRONMENTS = Functions("exgrpo.train.rollout.turns.environment", "environment.function", ("stop",))
MOST_TURNS = 1000


def _address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port is None or parts.path.strip("/"):
        raise ValueError(f"{url!r} is not an address like http://host:8000")
    return url.rstrip("/")


class RolloutConfig(CorrectionConfig):
    """Sampling of answers."""

    samples: int = Field(8, ge=2, le=MOST_SAMPLES, description="K: answers per question (group size).")
    temperature: Temperature = Field(
        1.0, description="Sampling temperature in training; the trained policy is the one at this temperature."
    )
    top_p: TopP = Field(
        1.0,
        description="Nucleus sampling in training; 1: off. If top_p, top_k or min_p restrict the tokens, ratios, loss, "
        "entropy bonus and divergence are over the allowed ones, which are stored with the answer.",
    )
    top_k: int = Field(
        0, ge=0, le=MOST_KEPT, description="Sample from so many of the likeliest tokens; 0: off. vLLM needs it to cut."
    )
    min_p: float = Field(
        0.0, ge=0, lt=1, description="Sample from tokens with at least this fraction of the highest probability."
    )
    max_tokens: int = Field(2048, ge=1, le=LONGEST, description="Longest response; longer ones are truncated.")
    stop: tuple[StopString, ...] = Field(
        (), description="Strings that end an answer: their tokens are trained on, but not graded."
    )
    batch_tokens: int = Field(
        65536,
        ge=1,
        le=MOST_TOKENS,
        description="Prompt + response tokens generated at once per rank; vLLM on GPUs uses its cache size instead.",
    )
    engine: Literal["auto", "transformers", "vllm", "server"] = Field(
        "auto",
        description="Generation engine; auto: rollout.servers if any, on GPUs vLLM if it can, else transformers.",
    )
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        le=16384,
        description="vLLM: GiB per rank for keys and values, on GPUs for as many answers as fit; None: chosen at the "
        "start from the GPU's memory, on CPUs 1.",
    )
    tensor_parallel: int = Field(
        1, ge=1, le=MOST_PROCESSES, description="vLLM: number of neighbouring ranks per engine."
    )
    sleep_level: Literal[0, 1, 2] | None = Field(
        None,
        description="vLLM on GPUs, during updates: 1 moves its weights to CPU memory, 2 drops them, 0 keeps them and "
        "the cache; None: 0 if the GPU has memory for all at once, else 2.",
    )
    servers: tuple[Annotated[str, AfterValidator(_address)], ...] = Field(
        (), description="vLLM servers that generate, http://host:port each."
    )
    refills: int = Field(
        0,
        ge=0,
        le=1000,
        description="Dynamic sampling (DAPO): replace groups without a gradient by further questions, at most so many "
        "times; then drop them.",
    )
    ahead: bool = Field(
        False,
        description="Generate the next step's answers during this step's update; needs servers and "
        "rollout.behaviour=engine.",
    )
    partial: bool = Field(
        False,
        description="Partial rollouts: train as soon as enough groups are whole, and let the newer policy go on with "
        "the other answers in the next step; needs rollout.behaviour=engine.",
    )
    oversample: float = Field(
        1.5, ge=1, le=16, description="partial: groups under way, as a multiple of those that a step needs."
    )
    max_staleness: int = Field(
        4, ge=1, le=MOST_STEPS, description="partial: an answer that began more steps ago begins anew."
    )
    check_every: int = Field(
        20,
        ge=0,
        le=MOST_STEPS,
        description="Compare the engine's log-probs with the trainer's every so many steps; 0: only at the start.",
    )

    @property
    def cut(self) -> dict[str, Any]:
        """Arguments of `Sampling` if top_p, top_k or min_p restrict the vocabulary, else empty."""
        cut = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        return {**cut, "allowed_tokens": True} if (self.top_p, self.top_k, self.min_p) != (1, 0, 0) else {}


def check_rollout(rollout: RolloutConfig) -> None:
    """Check combinations of options; raises ValueError."""
    if rollout.engine == "server" and not rollout.servers:
        raise ValueError("rollout.engine=server needs rollout.servers: name at least one, http://host:port")
    if len({*rollout.servers}) < len(rollout.servers):
        raise ValueError("rollout.servers: one of them is named twice")
    if rollout.servers and rollout.engine not in ("auto", "server"):
        raise ValueError(
            f"rollout.servers are given and rollout.engine is {rollout.engine}: leave one of them out, or take "
            "rollout.engine=server"
        )
    if rollout.cut and rollout.servers:
        raise ValueError(
            "rollout.top_p, top_k and min_p need the allowed tokens, which servers do not return: leave them "
            "out, or take rollout.engine transformers or vllm in place of rollout.servers"
        )
    if rollout.cut and rollout.engine == "vllm" and not rollout.top_k:
        raise ValueError(
            "rollout.top_p and min_p need rollout.top_k with vLLM, which returns the allowed tokens only among so many "
            "of the likeliest ones: set rollout.top_k, 50 for instance"
        )
    if rollout.partial:
        _check_partial(rollout)
    if rollout.ahead and rollout.refills:
        raise ValueError(
            "rollout.ahead and rollout.refills exclude each other: how many questions a step asks is known only "
            "when its answers are graded"
        )
    if rollout.ahead and not (rollout.servers and rollout.behaviour == "engine"):
        raise ValueError(
            "rollout.ahead needs rollout.servers, which generate while the trainer updates, and "
            "rollout.behaviour=engine, for the policy that wrote the answers is gone when they are scored"
        )


def _check_partial(rollout: RolloutConfig) -> None:
    if rollout.behaviour != "engine":
        raise ValueError(
            "rollout.partial needs rollout.behaviour=engine: an answer has tokens of several policies, and only the "
            "engine's log-probs are those of the policy that wrote each"
        )
    if rollout.ahead or rollout.refills or rollout.servers:
        raise ValueError(
            "rollout.partial excludes rollout.ahead, rollout.refills and rollout.servers: a step ends in the middle of "
            "its answers, and those go on in the next one; leave one of them out"
        )


class EnvironmentConfig(Section):
    """Environment that replies within an answer: tools, games, users (docs/environments.md)."""

    function: Annotated[str, ENVIRONMENTS.checked] | None = Field(
        None, description=f"Environment: {ENVIRONMENTS.choices} None: none."
    )
    stop: tuple[StopString, ...] | None = Field(
        None,
        description="Strings at which the policy waits for a reply, besides the EOS token; None: the function's.",
    )
    role: Literal["user", "tool"] | None = Field(
        None, description="Role of replies in the chat template; None: plain text."
    )
    turns: int = Field(8, ge=2, le=MOST_TURNS, description="Largest number of turns of the policy in an answer.")
    time_limit: float = Field(
        10.0, gt=0, le=3600, description="Seconds for a reply, at most an hour; later the answer ends unfinished."
    )


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
