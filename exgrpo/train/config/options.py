"""Configuration of a run: typed, validated, with a description of every field (`exgrpo train --help` prints them).

The defaults are for an ordinary model and your own questions, both of which have to be named. A YAML recipe
overrides them, and `--section.field VALUE` overrides both. Without a recipe, a model or questions, the recipe of the
default run is used.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.limits import (
    LARGEST_REWARD,
    LONGEST,
    MOST_ANSWERS,
    MOST_CALLS,
    MOST_GIB,
    MOST_PROCESSES,
    MOST_ROWS,
    MOST_STEPS,
)
from exgrpo.train.config.objective import MethodOptions, ObjectiveConfig
from exgrpo.train.config.policy import DEFAULT_PASS, LoraConfig, OptimizerConfig, PolicyConfig
from exgrpo.train.config.replay import ExperienceConfig
from exgrpo.train.config.rollout import (
    SAMPLED,
    TEST,
    EnvironmentConfig,
    EvaluationConfig,
    HeldOutSet,
    RolloutConfig,
    check_rollout,
)
from exgrpo.train.config.section import Folder, Section, Sources, Text
from exgrpo.train.config.sources import ColumnNames, SourceConfigs, settings_of

PLANNED = (
    *("policy.gradient_checkpointing", "optimizer.micro_batch_tokens"),
    *("rollout.kv_cache_gib", "rollout.sleep_level"),
)
"""Options that are chosen at the start of a run on GPUs by their memory, if not set."""
PROMPT_FORMAT = "{question}\n\nThink step by step, and put the final answer into \\boxed{{}}."
"""Prompt that makes any model answer in the form that the reward math_no_think reads."""


def as_in(section: type[Section], name: str, **changes: Any) -> Any:
    """Return a field with the constraints, default and description of a section's field, except for `changes`."""
    return FieldInfo.merge_field_infos(section.model_fields[name], **changes)


Weight = Annotated[float, Field(ge=1e-6, le=1e6)]


class DataConfig(Section):
    """Questions, their prompts and where they come from."""

    train: Sources = Field(
        description="One or several of: JSONL, JSON, parquet or CSV, a hub name, builtin:NAME?ARGUMENT=VALUE, "
        "reasoning_gym:NAME?ARGUMENT=VALUE."
    )
    train_weights: tuple[Weight, ...] = Field(
        (), description="Shares of the sources among the fresh questions, one number each; none: by their sizes."
    )
    train_split: str = Field("train", description="Split of a hub or builtin data set to train on.")
    train_limit: int | None = Field(
        None, ge=1, le=MOST_ROWS, description="Use only the first so many training questions of each source."
    )
    test: Sources | None = Field(None, description="Sources of held-out questions; None: no evaluation.")
    test_split: str = Field("test", description="Split of a hub or builtin data set to evaluate on.")
    test_limit: int | None = Field(
        None, ge=1, le=MOST_ROWS, description="Use only the first so many held-out questions of each source."
    )
    columns: ColumnNames = Field(
        default_factory=dict,
        description="Column names in files and hub data sets that differ (question Problem answer final_answer).",
    )
    sources: SourceConfigs = Field(
        (),
        description="In recipes: settings of single sources, a list of {source, columns, prompt_format, reward, stop}.",
    )
    keep_unreadable: bool = Field(
        False, description="Also train on rows whose gold answer is missing, cannot be read or can never be earned."
    )
    chat: bool = Field(True, description="Format prompts with the tokenizer's chat template.")
    system_prompt: Text | None = Field(None, description="System message put before every question.")
    keep_system: bool = Field(False, description="Use the data row's own system message.")
    prompt_format: Text = Field(
        PROMPT_FORMAT,
        description="Format string around every question; literal braces are doubled. Or the name of a prompt: "
        "reasoning_gym, verl_gsm8k, verl_math, open_r1.",
    )
    answer_prefix: Text = Field(
        "",
        description="Text that opens every answer, such as $'<think>\\n', if the chat template does not write it; it "
        "ends the prompt and is not trained.",
    )
    max_prompt_tokens: int = Field(
        1024, ge=1, le=LONGEST, description="Longer prompts are left out and counted; held-out ones count as wrong."
    )


PartWeight = Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]


class RewardConfig(Section):
    """Grading of answers."""

    function: str | None = Field(
        None,
        min_length=1,
        description="math, math_no_think, package.module:function or file.py:function, for all questions; None: the "
        "reward of their source, else math_no_think.",
    )
    form: Literal["auto", "boxed", "tags", "hashes", "line"] = Field(
        "auto",
        description="Form of the answer: \\boxed{}, <answer> tags, '#### 12' or 'Answer: 12'; auto: by the convention "
        "of the question's source.",
    )
    success: float = Field(
        1.0, ge=-LARGEST_REWARD, le=LARGEST_REWARD, description="A reward of at least this is a success."
    )
    workers: int = Field(2, ge=1, le=MOST_PROCESSES, description="Grading processes per rank.")
    time_limit: float = Field(
        5.0, gt=0, le=3600, description="Seconds per answer, at most an hour; then it is killed and scores 0."
    )
    max_failed: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Largest fraction of answers whose grading may fail or time out: a run stops after three steps in "
        "a row above it, an evaluation after one chunk. 1: neither stops.",
    )
    memory_gib: float = Field(
        4.0,
        gt=0,
        le=MOST_GIB,
        description="GiB that a grading process may allocate for an answer; above that, the answer fails.",
    )
    network: bool = Field(True, description="Let your own functions use the network; those of this package never may.")
    concurrency: int = Field(
        32, ge=1, le=MOST_CALLS, description="Concurrent calls of an asynchronous function per process."
    )
    parts: dict[str, PartWeight] = Field(
        default_factory=dict,
        description="Weights of the parts that a function returns (correct 1 format 0.2), default 1; the reward is "
        "their weighted sum.",
    )


class DistributedConfig(Section):
    """DeepSpeed ZeRO-3."""

    timeout_minutes: float = Field(
        30.0, ge=0.1, le=10080, description="Time limit of waiting ranks, at most a week; then they fail."
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Threads per process; None: OMP_NUM_THREADS, or on CPUs the number of free processors.",
    )
    offload_optimizer: bool = Field(False, description="Keep optimiser states in CPU memory (GPU runs).")
    persistence_threshold: int = Field(
        100_000, ge=0, le=10**12, description="Parameters with fewer elements stay unsharded; 10^12: all."
    )


class CheckpointConfig(Section):
    """Checkpoints to resume from (`--resume auto`)."""

    every: int | None = Field(
        10, ge=1, le=MOST_STEPS, description="Save every so many steps and after the last; None: never."
    )
    keep: int = Field(2, ge=1, le=MOST_STEPS, description="Number of latest checkpoints kept.")
    best: str | None = Field(
        None,
        description="Metric of the evaluations, such as test/pass_rate: the model with its highest value is kept in "
        "the folder best; None: no such model.",
    )


class OutputConfig(Section):
    """Output of a run."""

    folder: Folder = Field(Path("runs"), description="Parent folder of the runs' folders.")
    name: str | None = Field(None, description="Name of the run's folder, without '/'; None: date and time.")
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        ("tensorboard",),
        description="Destinations of metrics besides metrics.jsonl; several names, or the bare option for none.",
    )
    project: str = Field("exgrpo", min_length=1, description="Name of the project in wandb and trackio.")
    sample_groups: int = Field(
        2, ge=0, le=MOST_ANSWERS, description="Groups of rollouts written out per step for inspection."
    )
    tracked_questions: int = Field(
        4,
        ge=0,
        le=MOST_ANSWERS,
        description="Number of questions to track: the first ones written out, with all their later groups.",
    )
    save_model: bool = Field(True, description="Save the trained model in Hugging Face format.")
    export_every: int | None = Field(
        None, ge=1, le=MOST_STEPS, description="Also save the model under exports every so many steps; None: never."
    )
    push_to_hub: str | None = Field(
        None, description="OWNER/NAME: hub repository for the trained model, and the best one if kept."
    )
    private: bool = Field(True, description="push_to_hub: make a new repository private.")

    @field_validator("name")
    @classmethod
    def _one_folder(cls, name: str | None) -> str | None:
        if name is not None and (name in ("", ".", "..") or "/" in name or len(os.fsencode(name)) > 255):
            raise ValueError(
                "a run's name is that of one folder in output.folder: at most 255 bytes without '/', and not '.' or "
                "'..'"
            )
        return name


class Config(Section):
    """Train a language model by ExGRPO (arXiv 2510.02245). Without model, questions and recipe: the default run."""

    seed: int = Field(0, ge=0, lt=2**64, description="Seed of all randomness.")
    steps: int = Field(500, ge=0, le=MOST_STEPS, description="Training steps.")
    questions: int = Field(128, ge=1, le=MOST_ANSWERS, description="B: questions (groups) per step.")
    resume: str | None = Field(
        None, description="auto: resume the newest unfinished run in output.folder; or the folder of a run."
    )
    # A plain `off` of YAML is False.
    preflight: Annotated[
        Literal["stop", "warn", "off"], BeforeValidator(lambda given: "off" if given is False else given)
    ] = Field(
        "stop",
        description="Before training, generate and grade answers to a few questions; if none can earn a reward: stop, "
        "or only warn.",
    )
    policy: PolicyConfig
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    experience: ExperienceConfig = ExperienceConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    distributed: DistributedConfig = DistributedConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    output: OutputConfig = OutputConfig()

    @property
    def method(self) -> MethodOptions:
        """Options that the functions of a method and the loss read."""
        samples, temperature = self.rollout.samples, self.rollout.temperature
        return MethodOptions(self.experience, samples, self.reward.success, self.objective, temperature)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and response."""
        return self.data.max_prompt_tokens + self.rollout.max_tokens

    @property
    def pass_tokens(self) -> int:
        """Tokens per forward pass and rank: set, planned, or large enough for the longest sequence."""
        return self.optimizer.micro_batch_tokens or max(DEFAULT_PASS, self.longest)

    @property
    def common_stop(self) -> tuple[str, ...]:
        """Stop strings common to all training sources."""
        own = [settings_of(source, self.data.sources).stop for source in self.data.train]
        first, *others = [self.rollout.stop if of_source is None else of_source for of_source in own]
        return tuple(string for string in first if all(string in other for other in others))

    @property
    def update_scores(self) -> bool:
        """True if the first optimiser step may also score its fresh answers: it sees the policy before the update.

        Engine log-probs as weights, steps planned ahead, and a selection among the answers need the scores earlier.
        """
        rollout = self.rollout
        early = rollout.behaviour == "engine" or rollout.ahead or rollout.refills
        return not early and self.objective.train_on == "all"

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.optimizer.minibatches > self.questions:
            raise ValueError(
                f"optimizer.minibatches ({self.optimizer.minibatches}) exceeds questions ({self.questions}): "
                "every optimiser step needs at least one group"
            )
        if self.questions * self.rollout.samples > MOST_ANSWERS:
            raise ValueError(
                f"questions ({self.questions}) * rollout.samples ({self.rollout.samples}) exceed {MOST_ANSWERS} "
                "answers per step, which every rank holds in memory: lower one of them"
            )
        for key, budget in (
            ("optimizer.micro_batch_tokens", self.pass_tokens),
            ("rollout.batch_tokens", self.rollout.batch_tokens),
        ):
            if budget < self.longest:
                raise ValueError(
                    f"{key} ({budget}) is below data.max_prompt_tokens + rollout.max_tokens ({self.longest}): "
                    "one sequence must fit"
                )
        check_rollout(self.rollout)
        if self.environment.function is not None and self.rollout.tensor_parallel > 1:
            raise ValueError(
                "environment.function needs rollout.tensor_parallel=1: every process calls the environment itself, "
                "and the processes of one engine need the same replies"
            )
        if self.environment.function is not None and self.rollout.partial:
            raise ValueError(
                "rollout.partial and environment.function exclude each other: the environment of an answer that goes "
                "on later would have to be kept: leave one of them out"
            )
        if self.experience.prefix != "none" and (self.environment.function is not None or self.rollout.partial):
            raise ValueError(
                "experience.prefix excludes environment.function, whose state after the given tokens is unknown, and "
                "rollout.partial, which begins answers itself: leave it out"
            )
        weights, sources = self.data.train_weights, self.data.train
        if weights and sources != ("",) and len(weights) != len(sources):  # "": the command line is to name them
            raise ValueError(
                f"data.train_weights has {len(weights)} numbers and data.train {len(sources)} sources: give one number "
                "for each source, or none"
            )
        if self.objective.overlong_tokens > self.rollout.max_tokens:
            raise ValueError(
                f"objective.overlong_tokens ({self.objective.overlong_tokens}) are the last ones of rollout.max_tokens "
                f"({self.rollout.max_tokens}), and cannot be more"
            )
        if self.objective.train_on != "all" and self.experience.bucket_by == "reward_deviation":
            raise ValueError(
                f"objective.train_on={self.objective.train_on} is a band of success rates, which the continuous "
                "rewards of experience.bucket_by=reward_deviation do not have: use train_on=all"
            )
        return self


@dataclass(frozen=True)
class Asked:
    """Sampling of a set of held-out questions: the fields of `HeldOutSet` with defaults filled in."""

    source: tuple[str, ...]
    split: str
    limit: int | None
    samples: int
    temperature: float
    top_p: float


def held_out_sets(config: Config) -> dict[str, Asked]:
    """Return all sets of held-out questions of a run by name; that of data.test comes first."""
    data, evaluation = config.data, config.evaluation
    usual: dict[str, Any] = {"split": data.test_split, "limit": data.test_limit}
    usual |= {name: getattr(evaluation, name) for name in SAMPLED}
    sets = {TEST: HeldOutSet(source=data.test)} if data.test else {}
    return {
        name: Asked(**{**usual, **one.model_dump(exclude_none=True)}) for name, one in (sets | evaluation.sets).items()
    }


def check_evaluation(config: Config) -> None:
    """Raise ConfigError if an option depends on the metric of an evaluation, and there is none."""
    if config.evaluation.patience and not (config.checkpoint.best and config.evaluation.every):
        raise ConfigError(
            "evaluation.patience needs checkpoint.best, the number that has to improve, and evaluation.every"
        )
    if config.checkpoint.best and not held_out_sets(config):
        raise ConfigError("checkpoint.best needs held-out questions: set data.test, or evaluation.sets in a recipe")
