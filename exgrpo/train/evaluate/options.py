"""The options of an evaluation, and where they come from: the command line, a recipe of its own or that of a run."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from pydantic import Field, PositiveInt, ValidationError

from exgrpo.train.config import (
    Config,
    DataConfig,
    EvaluationConfig,
    PolicyConfig,
    RewardConfig,
    RolloutConfig,
    Section,
    StopString,
    as_in,
)
from exgrpo.train.data.prompts import PromptFormat
from exgrpo.train.errors import ConfigError
from exgrpo.train.pretrained.arguments import Overrides
from exgrpo.train.recipe import explain, read_recipe, split_recipe, unfinished

AS_TRAINED = {
    "data": tuple(field.name for field in fields(PromptFormat)),
    "evaluation": ("temperature", "top_p", "samples"),
    "rollout": ("max_tokens", "stop"),
    "policy": ("dtype", "overrides"),
    "reward": ("success", "time_limit"),
}
"""By section of a run's configuration: what an evaluation takes from it under the same name."""


class Options(Section):
    """Evaluate a causal LM: Pass@1, avg@k and unbiased pass@k by data source, every answer written down."""

    model: Annotated[str, tyro.conf.Positional] = Field(description="Folder or hub name, or builtin:NAME.")
    overrides: Overrides = as_in(PolicyConfig, "overrides")
    data: tuple[str, ...] = Field(min_length=1, description="JSONL, JSON or parquet files, hub or builtin names.")
    output: Path = Field(Path("evaluation"), description="Folder for answers.jsonl and scores.json.")
    split: str = Field("test", description="Split of hub and builtin data sets.")
    limit: int | None = Field(None, ge=1, description="Use only so many questions of each data set.")
    samples: int = as_in(EvaluationConfig, "samples", description="Answers per row.")
    avg: dict[str, PositiveInt] = Field(
        default_factory=dict,
        description="Answers per question for single data sources (aime 32 amc 32); rows that repeat a question count.",
    )
    temperature: float = as_in(
        EvaluationConfig, "temperature", default=0.6, description="Sampling temperature (the paper's 0.6)."
    )
    top_p: float = as_in(EvaluationConfig, "top_p")
    max_tokens: int = as_in(RolloutConfig, "max_tokens", default=8192, description="Longest response.")
    stop: tuple[StopString, ...] = as_in(
        RolloutConfig, "stop", description="Strings that end an answer; they are no part of its text."
    )
    max_prompt_tokens: int = as_in(
        DataConfig, "max_prompt_tokens", description="Longer prompts are not asked; they count as wrong."
    )
    chat: bool = as_in(DataConfig, "chat")
    system_prompt: str | None = as_in(DataConfig, "system_prompt")
    keep_system: bool = as_in(DataConfig, "keep_system")
    prompt_format: str = as_in(DataConfig, "prompt_format", description="Format string around every question.")
    answer_prefix: str = as_in(
        DataConfig,
        "answer_prefix",
        description="Text that opens every answer, such as '<think>\\n'; it ends the prompt.",
    )
    reward: str = as_in(RewardConfig, "function")
    success: float = as_in(RewardConfig, "success", description="An answer with a reward of at least this is right.")
    workers: int = as_in(RewardConfig, "workers")
    time_limit: float = as_in(RewardConfig, "time_limit", description="Seconds to grade an answer.")
    dtype: str = Field("bf16", pattern="^(fp32|bf16)$", description="fp32 or bf16.")
    batch_tokens: int = as_in(RolloutConfig, "batch_tokens")
    engine: Literal["auto", "transformers", "vllm"] = Field(
        "auto", description="What generates; auto: vLLM where it can, else transformers."
    )
    kv_cache_gib: float = as_in(RolloutConfig, "kv_cache_gib", default=1.0)
    chunk: int = Field(64, ge=1, description="Rows between two writes; an interrupted evaluation repeats one chunk.")
    seed: int = Field(0, ge=0, description="Seed of the samples.")


def parse_options(argv: Sequence[str]) -> Options:
    """Resolve `[--recipe FILE] MODEL --data FILE [--field VALUE ...]`; the command line beats the recipe."""
    recipe, rest = split_recipe(argv)
    return tyro.cli(
        Options,
        args=rest,
        default=defaults(recipe),
        config=(tyro.conf.FlagConversionOff,),
        prog="python -m exgrpo.train.evaluate",
        description=f"{Options.__doc__} --recipe FILE reads a YAML recipe before the options below are applied.",
    )


def defaults(recipe: Path | None) -> Options:
    """The options in a YAML recipe, or the default ones; model and data, if not there, are left to the command line.

    The recipe of a training run, such as the config.yaml in its folder, means: ask and grade as that run does.
    """
    values = read_recipe(recipe) if recipe else {}
    if "policy" in values:
        values = as_trained(unfinished(values, str(recipe)))
    try:
        checked = Options.model_validate({"model": "", "data": [""], **values})
    except ValidationError as error:
        raise ConfigError(explain(error, Options, str(recipe))) from None
    return checked.model_copy(update={key: tyro.MISSING for key in ("model", "data") if key not in values})


def as_trained(config: Config) -> dict[str, Any]:
    """The options with which a run's answers to its held-out questions are asked for and graded."""
    values = {name: getattr(getattr(config, section), name) for section, names in AS_TRAINED.items() for name in names}
    return {**values, "reward": config.reward.function}
