"""What a program asks of its rollout engine."""

from dataclasses import dataclass

import torch

from exgrpo.train.config.options import Config, RolloutConfig
from exgrpo.train.policy.source import ModelSource
from exgrpo.train.policy.tokenizer import DTYPES, Pretrained


@dataclass(frozen=True)
class EngineSettings:
    """The settings of any rollout engine; each engine reads those that concern it.

    Attributes:
        source: the model.
        dtype: compute dtype.
        eos: token ids that end a response; at least one.
        pad: token id that fills prompts up.
        max_prompt_tokens: longest prompt.
        rollout: which engine, the longest response, sizes and servers.
        attention: attention implementation of transformers.

    Raises:
        ValueError: there is no token id that ends a response.
    """

    source: ModelSource
    dtype: torch.dtype
    eos: tuple[int, ...]
    pad: int
    max_prompt_tokens: int
    rollout: RolloutConfig
    attention: str = "sdpa"

    def __post_init__(self) -> None:
        if not self.eos:
            raise ValueError("eos: a rollout engine needs at least one token id that ends a response")

    @property
    def length(self) -> int:
        """Tokens of the longest prompt and response."""
        return self.max_prompt_tokens + self.rollout.max_tokens


def training_settings(config: Config, pretrained: Pretrained) -> EngineSettings:
    """What a training run asks of its engine."""
    return EngineSettings(
        source=pretrained.model,
        dtype=DTYPES[config.policy.dtype],
        eos=pretrained.eos,
        pad=pretrained.pad,
        max_prompt_tokens=config.data.max_prompt_tokens,
        rollout=config.rollout,
        attention=config.policy.attention,
    )
