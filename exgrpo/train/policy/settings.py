"""What is trained of the policy, and by which steps."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from exgrpo.train.limits import MOST_ANSWERS, MOST_STEPS, MOST_TOKENS
from exgrpo.train.section import Section


class LoraConfig(Section):
    """LoRA: adapters are trained, and the model's own weights stay as they are."""

    path: str | None = Field(
        None,
        description="Folder of adapters to begin with, of a run or of peft, with their rank, alpha and layers; None: "
        "new ones.",
    )
    rank: int = Field(
        0, ge=0, le=4096, description="Rank of the adapters; 0: that of lora.path, without it all weights are trained."
    )
    alpha: int = Field(32, ge=1, le=10**6, description="What an adapter adds is multiplied by alpha / rank.")
    targets: tuple[str, ...] = Field(
        (), description="Last parts of the names of the adapted layers; none: all linear layers but the head."
    )
    head: bool = Field(False, description="Adapt the head, too.")
    quantised: Literal["none", "nf4"] = Field(
        "none", description="nf4: the model's own layers in 4 bits (QLoRA, by bitsandbytes); for one process."
    )
    result: Literal["adapters", "merged"] = Field(
        "adapters", description="What the run saves at its end: adapters for peft, or the model with them added."
    )

    @model_validator(mode="after")
    def _adapted(self) -> Self:
        if self.quantised != "none" and not (self.rank or self.path):
            raise ValueError("quantised weights cannot be trained, only adapters beside them: give lora.rank")
        return self


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0, le=1, description="Peak learning rate: how far a step moves a weight, so at most 1.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="AdamW betas."
    )
    weight_decay: float = Field(
        0.01, ge=0, le=100, description="AdamW weight decay; a step takes lr * weight_decay of each weight away."
    )
    decay: Literal["all", "matrices"] = Field(
        "all", description="Which weights decay: all, or matrices alone, without norms and biases."
    )
    grad_clip: float = Field(
        1.0, ge=0, le=1e6, description="Gradient norm is clipped here; 0 = off, and no norm in use reaches 1e6."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="After the warm-up.")
    min_lr: float = Field(0.0, ge=0, le=1, description="Learning rate in which a linear or cosine schedule ends.")
    ema: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Decay, by optimiser step, of a moving average of the weights, which is evaluated and saved as the "
        "model; 0: there is none.",
    )
    warmup_steps: int = Field(0, ge=0, le=MOST_STEPS, description="Optimiser steps of linear warm-up.")
    minibatches: int = Field(2, ge=1, le=MOST_ANSWERS, description="Optimiser steps per pass over a step's answers.")
    passes: int = Field(1, ge=1, le=100, description="Passes over a step's answers, each in an order of its own.")
    micro_batch_tokens: int = Field(16384, ge=1, le=MOST_TOKENS, description="Tokens per forward pass and rank.")

    @property
    def steps_per_batch(self) -> int:
        """Optimiser steps of a training step in which every mini-batch has an advantage."""
        return self.minibatches * self.passes

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.min_lr and self.schedule == "constant":
            raise ValueError(f"min_lr ({self.min_lr:g}): a constant schedule does not fall; take linear or cosine")
        if self.min_lr and self.min_lr >= self.lr:
            raise ValueError(f"min_lr ({self.min_lr:g}): the schedule falls to it from lr ({self.lr:g}); lower it")
        return self
