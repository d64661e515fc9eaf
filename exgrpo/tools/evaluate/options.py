"""The options of an evaluation, from the command line, its own recipe or that of a run."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from pydantic import Field, PositiveInt, ValidationError

from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.limits import LONGEST
from exgrpo.train.config.command_line import check_names, one_line
from exgrpo.train.config.options import (
    Config,
    DataConfig,
    DistributedConfig,
    PolicyConfig,
    RewardConfig,
    RolloutConfig,
    as_in,
)
from exgrpo.train.config.policy import Dtype, Overrides
from exgrpo.train.config.recipe import (
    RecipeArgument,
    load_stored,
    merged,
    origin_of,
    read_recipes,
    split_recipe,
    unfinished,
)
from exgrpo.train.config.rollout import SAMPLED, EnvironmentConfig, EvaluationConfig
from exgrpo.train.config.section import Folder, Section, Sources, StopString, Text, explain, flat, known_keys
from exgrpo.train.config.sources import ColumnNames, SourceConfigs
from exgrpo.train.data.prompts import PromptFormat

CONFIG = "config.yaml"  # in a run's folder
PROGRAM = "python -m exgrpo.tools.evaluate"
AS_TRAINED = {
    "data": ("columns", "sources", *(field.name for field in fields(PromptFormat))),
    "rollout": ("max_tokens", "stop"),
    "environment": tuple(EnvironmentConfig.model_fields),
    "policy": ("dtype", "overrides"),
    "reward": tuple(name for name in RewardConfig.model_fields if name != "workers"),
}
"""Options by section that an evaluation takes from a run's configuration."""
LONGEST_ANSWER = 8192  # tokens, if neither an option nor a run sets a limit


class PolicyOptions(Section):
    """Loading of the model."""

    overrides: Overrides = as_in(PolicyConfig, "overrides")
    dtype: Dtype = as_in(PolicyConfig, "dtype", description="Dtype of the weights.")


class LoraOptions(Section):
    """Adapters added to the model."""

    path: str | None = Field(None, description="Folder of adapters, of a run or of peft, that are added to the model.")


class DataOptions(Section):
    """Questions and their prompts."""

    test: Sources = Field(description="JSONL, JSON, parquet or CSV files, hub names, builtin:NAME, reasoning_gym:NAME.")
    test_split: str = as_in(DataConfig, "test_split")
    test_limit: int | None = as_in(DataConfig, "test_limit", description="Use only so many questions of each data set.")
    columns: ColumnNames = as_in(DataConfig, "columns")
    sources: SourceConfigs = as_in(DataConfig, "sources")
    chat: bool = as_in(DataConfig, "chat")
    system_prompt: Text | None = as_in(DataConfig, "system_prompt")
    keep_system: bool = as_in(DataConfig, "keep_system")
    prompt_format: Text = as_in(DataConfig, "prompt_format")
    answer_prefix: Text = as_in(
        DataConfig,
        "answer_prefix",
        description="Text that opens every answer, such as $'<think>\\n'; it ends the prompt.",
    )
    max_prompt_tokens: int = as_in(
        DataConfig, "max_prompt_tokens", description="Longer prompts are not asked; they count as wrong."
    )


class RolloutOptions(Section):
    """Number of answers per question, and their generation."""

    samples: int = as_in(EvaluationConfig, "samples", description="Answers per row.")
    avg: dict[str, PositiveInt] = Field(
        default_factory=dict,
        description="Answers per question for single data sources (aime 32 amc 32); rows that repeat a question count.",
    )
    temperature: float = as_in(
        EvaluationConfig, "temperature", default=0.6, description="Sampling temperature (the paper's 0.6)."
    )
    top_p: float = as_in(EvaluationConfig, "top_p")
    max_tokens: int | None = Field(
        None,
        ge=1,
        le=LONGEST,
        description=f"Longest response; None: what the model has positions for, at most {LONGEST_ANSWER}.",
    )
    stop: tuple[StopString, ...] = as_in(
        RolloutConfig, "stop", description="Strings that end an answer; they are no part of its text."
    )
    batch_tokens: int = as_in(RolloutConfig, "batch_tokens")
    engine: Literal["auto", "transformers", "vllm"] = Field(
        "auto", description="Generation engine; auto: vLLM if it is usable, else transformers."
    )
    kv_cache_gib: float | None = as_in(
        RolloutConfig,
        "kv_cache_gib",
        description="vLLM: GiB per rank for keys and values, on GPUs of as many answers as have room there; None: 30 % "
        "of the GPU's memory, on CPUs 1.",
    )


class DistributedOptions(Section):
    """Settings of each process."""

    threads: int | None = as_in(DistributedConfig, "threads")


class OutputOptions(Section):
    """Files that an evaluation writes."""

    folder: Folder = Field(Path("evaluation"), description="Folder for answers.jsonl and scores.json.")


class EvaluationOptions(Section):
    """Evaluate a causal LM: Pass@1, avg@k and unbiased pass@k by data source; all answers are saved."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = Field(
        description="Folder or hub name, builtin:NAME, or a run's folder: its trained model, with the run's prompts."
    )
    seed: int = Field(0, ge=0, description="Seed of the samples.")
    chunk: int = Field(64, ge=1, description="Rows between two writes; an interrupted evaluation repeats one chunk.")
    policy: PolicyOptions = PolicyOptions()
    lora: LoraOptions = LoraOptions()
    data: DataOptions
    reward: RewardConfig = RewardConfig()
    rollout: RolloutOptions = RolloutOptions()
    environment: EnvironmentConfig = EnvironmentConfig()
    distributed: DistributedOptions = DistributedOptions()
    output: OutputOptions = OutputOptions()


def parse_options(argv: Sequence[str]) -> EvaluationOptions:
    """Parse `[--recipe FILE] MODEL --data.test FILE [--section.field VALUE ...]`; options override the recipe.

    If MODEL is a run's folder, the default recipe is the run's.

    Raises:
        ConfigError: the recipe is wrong, an option is unknown (the message suggests a similar one), a value is
            impossible, or a run has no trained model.
    """
    recipes, rest = split_recipe(argv)
    check_names(rest, EvaluationOptions, RecipeArgument)
    options = _parsed(rest, recipes)
    if (Path(options.model) / CONFIG).is_file() and not (Path(options.model) / "config.json").exists():
        run = Path(options.model)
        options = _of_run(options if recipes else _parsed(rest, [run / CONFIG]), run)
    return options


def _of_run(options: EvaluationOptions, run: Path) -> EvaluationOptions:
    """Replace a run's folder by its model; adapters are added to the model that they were trained for."""
    trained = run / "model"
    if (trained / "config.json").is_file():
        return options.model_copy(update={"model": str(trained)})
    if not (trained / "adapter_config.json").is_file():
        raise ConfigError(
            f"{run} is a run without a trained model: let it end, or name another of its models, as {run}/best"
        )
    base = load_stored(run / CONFIG).policy.path
    return options.model_copy(update={"model": base, "lora": LoraOptions(path=str(trained))})


def _parsed(rest: Sequence[str], recipes: Sequence[Path]) -> EvaluationOptions:
    with one_line(EvaluationOptions, PROGRAM):
        return tyro.cli(
            EvaluationOptions,
            args=list(rest),
            default=defaults(recipes),
            config=(tyro.conf.FlagConversionOff,),
            prog=PROGRAM,
            description=f"{EvaluationOptions.__doc__} --recipe FILE reads a YAML recipe; options override it.",
            use_underscores=True,
        )


def defaults(recipes: Sequence[Path]) -> EvaluationOptions:
    """Return the options in YAML recipes, or the defaults; a missing model or data set must be on the command line.

    The recipe of a training run, such as the config.yaml in its folder, selects the run's prompts and grading, but not
    its questions. It is recognized by an option that only training has.
    """
    values, origin = read_recipes(recipes), origin_of(recipes)
    if flat(values).keys() & (set(known_keys(Config)) - set(known_keys(EvaluationOptions))):
        values = as_trained(unfinished(values, origin))
    try:
        checked = EvaluationOptions.model_validate(merged({"model": "", "data": {"test": [""]}}, values))
    except ValidationError as error:
        raise ConfigError(explain(error, EvaluationOptions, origin)) from None
    if "test" not in values.get("data", {}):
        checked = checked.model_copy(update={"data": checked.data.model_copy(update={"test": tyro.MISSING})})
    return checked if "model" in values else checked.model_copy(update={"model": tyro.MISSING})


def as_trained(config: Config) -> dict[str, Any]:
    """Return the options with which a run asks and grades its held-out questions."""
    values = {
        section: {name: getattr(getattr(config, section), name) for name in names}
        for section, names in AS_TRAINED.items()
    }
    values["rollout"] |= {name: getattr(config.evaluation, name) for name in SAMPLED}
    return values
