"""The options of ExGRPO in TRL: GRPOConfig's, and those of a recipe of `exgrpo.train`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from exgrpo.extras import needs
from exgrpo.integrations.trl_loss import beyond_kernel
from exgrpo.integrations.trl_replay import ROW_NUMBERS, distinct_rows

with needs(__name__, "exgrpo[trl]"):
    from datasets import Dataset
    from pydantic import ValidationError
    from trl import GRPOConfig

    from exgrpo.train.common.errors import ConfigError
    from exgrpo.train.common.functions import Needs
    from exgrpo.train.config.objective import MethodOptions
    from exgrpo.train.config.options import (
        ExperienceConfig,
        ObjectiveConfig,
        PolicyConfig,
        RewardConfig,
        RolloutConfig,
        Section,
    )
    from exgrpo.train.config.replay import MethodKind
    from exgrpo.train.config.section import explain
    from exgrpo.train.replay import rules
    from exgrpo.train.replay.rehearsal import rehearse
    from exgrpo.train.run.traces import check_traces

IMAGES = "train_dataset, tools: replay supports only text, got images; use GRPOTrainer with FusedLossMixin"
RANGES = {
    "replay_beta": (1e-6, 1e6, "a number from 1e-06 to 1e+06", "; for the plain ratio, set weigh='ratio'"),
    "success": (-math.inf, math.inf, "a finite number", ""),
    "entropy_coef": (-math.inf, math.inf, "a finite number", ""),
    "epsilon": (0, math.inf, "a number of at least 0", ""),
    "epsilon_high": (0, math.inf, "a number of at least 0", ""),
    "temperature": (math.ulp(0), math.inf, "a number above 0", ""),
}
"""Least and largest value, description, remedy. Beyond its range `replay_beta` makes shaped ratios 1 or 0."""


def _help(section: type[Section], name: str) -> dict[str, Any]:
    return {"help": section.model_fields[name].description}


def _of_recipe(section: type[Section], name: str) -> Any:
    return field(default=section.model_fields[name].default, metadata=_help(section, name))


def _list(name: str) -> Callable[[], list[Any]]:
    """Return a list factory of a tuple option's default; only lists work on command lines."""
    return partial(list, ExperienceConfig.model_fields[name].default)


_experience, _objective = partial(_of_recipe, ExperienceConfig), partial(_of_recipe, ObjectiveConfig)


@dataclass
class ExGRPOConfig(GRPOConfig):
    """GRPOConfig with the options of experience replay, named as in the recipes of `exgrpo.train`.

    The defaults are the paper's: loss type dr_grpo, unscaled advantages, an entropy bonus of 0.001.

    Raises:
        ConfigError: a ValueError: an option is out of range or excludes replay; one line with the remedy. It is raised
            before the checks of TRL.
    """

    loss_type: str = field(default="dr_grpo", metadata={"help": "dr_grpo, dapo, bnpo or grpo."})
    scale_rewards: str = field(default="none", metadata={"help": "none, group or batch."})
    entropy_coef: float = field(default=0.001, metadata={"help": "Weight of the mean token entropy bonus."})
    ratio: float = _experience("ratio")
    repeat: float = _experience("repeat")
    start_pass_rate: float = _experience("start_pass_rate")
    admit: str = _experience("admit")
    prioritise: str = _experience("prioritise")
    compose: str = _experience("compose")
    expire: list[str] = field(default_factory=_list("expire"), metadata=_help(ExperienceConfig, "expire"))
    mu: float = _experience("mu")
    sigma: float = _experience("sigma")
    age_scale: float = _experience("age_scale")
    drift: float = _experience("drift")
    trajectory: str = _experience("trajectory")
    replayed: int = _experience("replayed")
    advantage: str = _experience("advantage")
    count_replayed: bool = _experience("count_replayed")
    bucket_by: str = _experience("bucket_by")
    band: list[float] = field(default_factory=_list("band"), metadata=_help(ExperienceConfig, "band"))
    cooldown: int = _experience("cooldown")
    lag: int = _experience("lag")
    hard: float = _experience("hard")
    max_per_question: int | None = _experience("max_per_question")
    max_age: int | None = _experience("max_age")
    max_uses: int | None = _experience("max_uses")
    capacity: int | None = _experience("capacity")
    start: str | None = _experience("start")
    start_log_prob: str = _experience("start_log_prob")
    refills: int = _of_recipe(RolloutConfig, "refills")
    success: float = _of_recipe(RewardConfig, "success")
    weigh: str = _objective("weigh")
    replay_beta: float = _objective("beta")
    second_moment: float = _objective("second_moment")
    trigger: float = _objective("trigger")
    coefficient: float = _objective("coefficient")
    clip_with_replay: bool = _objective("clip_with_replay")
    kernel_memory_gib: float | None = _of_recipe(PolicyConfig, "kernel_memory_gib")

    def __post_init__(self) -> None:
        check(self)
        super().__post_init__()

    @property
    def kernel_memory(self) -> int | None:
        """Bytes that the kernels may take beyond gradients; None: their default."""
        return _section(PolicyConfig, {"path": "", "kernel_memory_gib": self.kernel_memory_gib}).kernel_memory

    @property
    def experience(self) -> ExperienceConfig:
        """The recipe's section `experience`."""
        return _section(ExperienceConfig, self._values(ExperienceConfig))

    @property
    def objective(self) -> ObjectiveConfig:
        """The recipe's section `objective`, without options that TRL has itself."""
        own = {field.name for field in fields(GRPOConfig)}
        values = {name: value for name, value in self._values(ObjectiveConfig).items() if name not in own}
        return _section(ObjectiveConfig, {**values, "beta": self.replay_beta})

    @property
    def method(self) -> MethodOptions:
        """Options that the functions of a method read, those of TRL among them."""
        objective = self.objective.model_copy(update={"scale_by_std": self.scale_rewards == "group"})
        return MethodOptions(self.experience, self.num_generations, self.success, objective, self.temperature)

    def _values(self, section: type[Section]) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name in section.model_fields}


def check(options: ExGRPOConfig) -> None:
    """Check the options of replay, and those of TRL that it depends on; raise ConfigError."""
    for name, (least, most, expected, remedy) in RANGES.items():
        value = getattr(options, name)
        fits = isinstance(value, int | float) and math.isfinite(value) and least <= value <= most
        if not (fits or (name == "epsilon_high" and value is None)):
            raise ConfigError(f"{name}: expected {expected}, got {value!r}{remedy}")
    _ = options.kernel_memory  # reading it validates it
    _section(RolloutConfig, {"refills": options.refills})
    if truncated := _truncated_sampling(options):
        raise ConfigError(
            f"{', '.join(truncated)}: importance ratios compare probabilities under the whole distribution; leave "
            "it at its default, and lower temperature for likelier answers"
        )
    if not options.shuffle_dataset:
        raise ConfigError(
            f"shuffle_dataset={options.shuffle_dataset}: questions are drawn in a random order; leave it at its default"
        )
    if beyond := beyond_kernel(options):
        raise ConfigError(f"{', '.join(beyond)}: not part of the objective with replay; leave it at its default")
    _check_method(options)


def check_arguments(given: Mapping[str, Any]) -> list[int]:
    """Check the arguments of `ExGRPOTrainer` before loading a model; return the first row of each distinct question."""
    args, train_dataset = given.get("args"), given.get("train_dataset")
    if not isinstance(args, ExGRPOConfig):
        raise TypeError(f"args: expected an ExGRPOConfig, got {type(args).__name__}")
    check(args)  # fields may have been assigned after __init__
    if args.experience.start:
        check_traces(args.experience.start)
    if not isinstance(train_dataset, Dataset):
        raise TypeError(
            f"train_dataset: expected a datasets.Dataset, got {type(train_dataset).__name__}: experience "
            "refers to questions by index; convert a streamed one by Dataset.from_generator"
        )
    acting = [name for name in ("tools", "environment_factory") if given.get(name)]
    # An environment may use the row's number as the seed of a game.
    rows = distinct_rows(train_dataset, () if "environment_factory" in acting else ROW_NUMBERS)
    questions = args.generation_batch_size // args.num_generations
    if len(rows) < questions:
        raise ValueError(
            f"train_dataset: a generation takes {questions} different questions and there are "
            f"{len(rows)} in {len(train_dataset)} rows; lower generation_batch_size"
        )
    if {"image", "images"} & set(train_dataset.column_names):
        raise ValueError(IMAGES)
    if acting and _needs("compose", args.compose).in_place:
        raise ValueError(in_place_of_turns(", ".join(acting), args.compose))
    if args.start and "environment_factory" in acting:
        raise ValueError("start: only the environment_factory knows the prompts of its questions; leave one out")
    return rows


def in_place_of_turns(acting: str, compose: str) -> str:
    """Return the error message for stored answers in the places of fresh ones with tools or environments."""
    return (
        f"{acting}: compose={compose!r} puts stored answers in the places of fresh ones, unseen by the tools or "
        "environments there; use a composition that adds stored answers, such as 'appended'"
    )


def _check_method(options: ExGRPOConfig) -> None:
    method = options.method  # which checks the values
    if _needs("admit", options.admit).distinct == "key":
        raise ConfigError(
            f"admit={options.admit!r}: compares answers by the keys of their solutions, which rewards in TRL do not "
            "return; use admit='successes'"
        )
    compose = _needs("compose", options.compose)
    if options.refills and compose.fills:
        raise ConfigError(
            f"refills={options.refills}: replaces groups without a gradient by further questions, and "
            f"compose={options.compose!r} puts stored groups there; leave one of them out"
        )
    rehearse(method)
    if compose.keeps_groups and options.advantage == "group" and not options.refills:
        return
    of_whole = {"scale_rewards": "batch", "multi_objective_aggregation": "normalize_then_sum"}
    if given := [f"{name}={value!r}" for name, value in of_whole.items() if getattr(options, name) == value]:
        raise ConfigError(
            f"{', '.join(given)}: divides by a deviation over all answers of a generation, but with "
            f"compose={options.compose!r}, advantage={options.advantage!r} and refills={options.refills} training uses "
            "other answers; use scale_rewards 'none' or 'group' and multi_objective_aggregation='sum_then_normalize'"
        )


def _needs(kind: MethodKind, name: str) -> Needs:
    return Needs.of(rules.find(kind, name))


def _truncated_sampling(options: GRPOConfig) -> list[str]:
    whole = {
        "top_p": (None, 1),
        "top_k": (None, 0, -1),
        "min_p": (None, 0),
        "typical_p": (None, 1),
        "repetition_penalty": (None, 1),
        "presence_penalty": (None, 0),
        "frequency_penalty": (None, 0),
        "vllm_structured_outputs_regex": (None,),
        "temperature": (options.temperature,),
    }
    given = {name: getattr(options, name, None) for name in whole}
    if isinstance(options.generation_kwargs, dict):  # a string on the command line; checked again after TRL parses it
        given |= options.generation_kwargs
    return [f"{name}={given[name]}" for name, values in whole.items() if given[name] not in values]


def _section(section: type[Any], values: dict[str, Any]) -> Any:
    try:
        return section(**values)
    except ValidationError as error:
        raise ConfigError(explain(error, section, "ExGRPOConfig")) from None
