"""Options of the policy, its adapters and the optimiser; saved adapters determine their own options.

Imports neither torch nor peft.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError, model_validator
from tyro.constructors import PrimitiveConstructorSpec

from exgrpo.train.common.errors import ConfigError, ModelError, os_errors_as, shown
from exgrpo.train.common.functions import ASSETS, PREFIX, model_names
from exgrpo.train.common.limits import MOST_ANSWERS, MOST_STEPS, MOST_TOKENS
from exgrpo.train.common.plain import parse_yaml
from exgrpo.train.config.section import Section, explain

# Tried in this order, so that texts that are numbers become numbers (YAML reads 1e6 as text).
Scalar = Annotated[StrictBool | StrictInt | float | str, Field(union_mode="left_to_right")]


def to_arguments(overrides: Mapping[str, Any]) -> list[str]:
    """Format overrides for a command line: KEY=VALUE each."""
    return [f"{key}={value}" for key, value in overrides.items()]


def from_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE arguments; the inverse of `to_arguments`.

    Raises:
        ConfigError: an argument is not KEY=VALUE, or the value is not YAML.
    """
    overrides = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not (key and equals and value):
            raise ConfigError(f"overrides are KEY=VALUE, separated by spaces, and {shown(argument)} is not")
        try:
            overrides[key] = parse_yaml(value)
        except ConfigError as error:
            raise ConfigError(f"the override {shown(argument)}: {error}") from None
    return overrides


# tyro's own syntax for mappings depends on the default's content and cannot express an empty one.
Overrides = Annotated[
    dict[str, Scalar],
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="KEY=VALUE ...",
        instance_from_str=from_arguments,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=to_arguments,
    ),
]


def located(path: str) -> str:
    """Return the local folder of a model's path, or the hub name.

    Raises:
        ModelError: it is neither builtin:NAME nor a folder with a model, and no hub name.
    """
    with os_errors_as(ModelError, f"policy.path: {path!r} cannot be read"):
        if path.startswith(PREFIX):
            folder = ASSETS / path.removeprefix(PREFIX)
            if not (folder / "config.json").is_file():
                known = ", ".join(model_names()) or "none"
                raise ModelError(f"policy.path: no builtin model {path!r}; there is {known}")
            return str(folder)
        if path.startswith((".", "/", "~")) or Path(path).exists():
            folder = Path(os.path.expanduser(path))
            if not (folder / "config.json").is_file():
                if (folder / "adapter_config.json").is_file():
                    way = f"name the model that they are for, and --lora.path {shlex.quote(str(folder))} as well"
                    raise ModelError(f"policy.path: {folder} holds adapters and no model: {way}")
                there = f": {folder / 'model'} does" if (folder / "model" / "config.json").is_file() else ""
                raise ModelError(f"policy.path: {folder} holds no config.json, so no Hugging Face model{there}")
            return str(folder)
        return path


def on_hub(path: str) -> bool:
    """Return True if a model's path is a hub name; raises ModelError as `located` does."""
    return not Path(located(path)).is_dir()


ADAPTER_FILE = "adapter_config.json"
"""Configuration file in a folder of adapters saved by peft."""
HEAD = "lm_head"
"""Name of the output head in most models."""
DEFAULT_PASS = 16384
"""Tokens per forward pass if no memory plan chooses them."""
Dtype = Literal["fp32", "bf16", "fp16"]
"""Compute dtype of a model."""
MOST_RANK, MOST_ALPHA = 4096, 10**6


class PolicyConfig(Section):
    """The model that is trained."""

    path: str = Field(description="Folder or hub name of a causal LM, or builtin:NAME.")
    overrides: Overrides = Field(
        default_factory=dict,
        description="Values of the model's configuration to change: max_position_embeddings=16384 rope_theta=40000.",
    )
    dtype: Dtype = Field(
        "bf16",
        description="Compute dtype; masters stay fp32. fp16 rounds finer than bf16 and has a dynamic loss scale.",
    )
    gradient_checkpointing: bool | None = Field(
        None,
        description="Recompute activations in the backward pass; None: chosen at the start from the GPU's memory, on "
        "CPUs True.",
    )
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="Attention implementation of transformers.")
    compile: Literal["auto", "none", "inductor"] = Field(
        "auto",
        description="inductor: compile the layers with torch.compile, which fuses norms, rotary embeddings and "
        "activations; for one process. auto: on a GPU, if they then give what plain ones do.",
    )
    kernel_backend: str = Field("auto", description="Backend of exgrpo.kernels for the fused head.")
    kernel_memory_gib: float | None = Field(
        None, ge=0.25, description="GiB of workspace for a pass of the fused head, without gradients; None: 1 on a GPU."
    )

    @property
    def kernel_memory(self) -> int | None:
        """`kernel_memory_gib` in bytes."""
        return None if self.kernel_memory_gib is None else int(self.kernel_memory_gib * 2**30)

    @property
    def checkpointing(self) -> bool:
        """True if activations are recomputed: as set or planned, by default True."""
        return self.gradient_checkpointing is not False


class LoraConfig(Section):
    """LoRA: train adapters and freeze the model's own weights."""

    path: str | None = Field(
        None,
        description="Folder of adapters to start from, saved by a run or by peft, with their rank, alpha and layers; "
        "None: new ones.",
    )
    rank: int = Field(
        0,
        ge=0,
        le=MOST_RANK,
        description="Rank of the adapters; 0: that of lora.path, or else all weights are trained.",
    )
    alpha: int = Field(32, ge=1, le=MOST_ALPHA, description="The output of an adapter is multiplied by alpha / rank.")
    targets: tuple[str, ...] = Field(
        (), description="Last parts of the names of adapted layers; none: all linear layers except the head."
    )
    head: bool = Field(False, description="Also adapt the head.")
    quantised: Literal["none", "nf4"] = Field(
        "none", description="nf4: quantise the model's own layers to 4 bits (QLoRA, bitsandbytes); for one process."
    )
    result: Literal["adapters", "merged"] = Field(
        "adapters", description="Output of the run: adapters for peft, or the model with the adapters merged."
    )

    @model_validator(mode="after")
    def _adapted(self) -> Self:
        if self.quantised != "none" and not (self.rank or self.path):
            raise ValueError("quantised weights cannot be trained, only adapters on them: give lora.rank")
        return self


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0, le=1, description="Peak learning rate: about the step of a weight, so at most 1.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="AdamW betas."
    )
    weight_decay: float = Field(
        0.01, ge=0, le=100, description="AdamW weight decay; a step removes lr * weight_decay of each weight."
    )
    decay: Literal["all", "matrices"] = Field(
        "all", description="Weights that decay: all, or only matrices, without norms and biases."
    )
    grad_clip: float = Field(
        1.0, ge=0, le=1e6, description="Largest gradient norm; larger ones are clipped. 0: off, as is 1e6 in practice."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Schedule after the warm-up.")
    min_lr: float = Field(0.0, ge=0, le=1, description="Final learning rate of a linear or cosine schedule.")
    warmup_steps: int = Field(0, ge=0, le=MOST_STEPS, description="Optimiser steps of linear warm-up.")
    minibatches: int = Field(2, ge=1, le=MOST_ANSWERS, description="Optimiser steps per pass over a step's answers.")
    passes: int = Field(1, ge=1, le=100, description="Passes over a step's answers, each in a new order.")
    micro_batch_tokens: int | None = Field(
        None,
        ge=1,
        le=MOST_TOKENS,
        description="Tokens per forward pass and rank; None: chosen at the start from the GPU's memory, on CPUs "
        f"{DEFAULT_PASS}, or more if the longest sequence needs it.",
    )

    @property
    def steps_per_batch(self) -> int:
        """Optimiser steps of a training step if every mini-batch has an advantage."""
        return self.minibatches * self.passes

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.min_lr and (self.schedule == "constant" or self.min_lr >= self.lr):
            raise ValueError(f"min_lr ({self.min_lr:g}): a linear or cosine schedule falls to it from lr ({self.lr:g})")
        return self


class SavedAdapters(BaseModel):
    """peft's description of saved adapters; entries that are not read here are in `model_extra`."""

    model_config = ConfigDict(extra="allow")

    peft_type: Literal["LORA"]
    r: int = Field(ge=1, le=MOST_RANK)
    lora_alpha: int = Field(ge=1, le=MOST_ALPHA)
    target_modules: list[str] = Field(min_length=1)
    base_model_name_or_path: str | None = None


def with_saved(options: LoraConfig) -> LoraConfig:
    """Return the options with the rank, alpha and layers of the adapters in `path`, if set.

    Raises:
        ConfigError: there are no such adapters, they are of another kind, or an option contradicts them.
    """
    if options.path is None:
        return options
    saved = saved_adapters(options.path)
    layers = set(saved.target_modules)
    head = HEAD in layers and len(layers) > 1
    found: dict[str, Any] = {
        "rank": saved.r,
        "alpha": saved.lora_alpha,
        "targets": tuple(sorted(layers - {HEAD} if head else layers)),
        "head": head,
    }
    for name, own in found.items():
        stated = getattr(options, name)
        same = set(stated) == set(own) if name == "targets" else stated == own
        if not same and stated != LoraConfig.model_fields[name].default:
            raise ConfigError(
                f"lora.{name} is {shown(stated)}, and that of the adapters in lora.path {options.path} is "
                f"{shown(own)}: leave lora.{name} out"
            )
    return options.model_copy(update=found)


def saved_adapters(folder: str) -> SavedAdapters:
    """Read peft's description of the adapters in a folder.

    Raises:
        ConfigError: the folder holds none, they are not LoRA, or the file is damaged.
    """
    file = Path(os.path.expanduser(folder)) / ADAPTER_FILE
    with os_errors_as(ConfigError, f"lora.path: {folder} cannot be read"):
        if not file.is_file():
            raise ConfigError(
                f"lora.path: {folder} is no folder with an {ADAPTER_FILE}, as peft saves adapters; `hf download` "
                "fetches those of the hub into a folder"
            )
        content = file.read_bytes()
    try:
        return SavedAdapters.model_validate_json(content)
    except ValidationError as error:
        raise ConfigError(explain(error, SavedAdapters, f"lora.path: {file}")) from None
