"""Base weights in 4 bits (QLoRA, arXiv 2305.14314) by bitsandbytes: how they are loaded, and what they stand for."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from exgrpo.train.config import Config
from exgrpo.train.errors import ConfigError


def quantisation(config: Config, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """How transformers is to quantise the model of a run; None: not at all.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    if config.lora.quantised == "none":
        return None
    if not find_spec("bitsandbytes"):
        raise ConfigError("lora.quantised: weights in 4 bits need bitsandbytes: pip install 'exgrpo[lora]'")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.lora.quantised,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
    )


def same_in_inference(model: nn.Module) -> None:
    """Have quantised layers compute the same with and without gradients.

    On processors with AVX512-BF16, bitsandbytes rounds their scales to 8 bits when no gradient is wanted: ratios of one
    policy to itself would not be 1.
    """
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


def dense(parameter: nn.Parameter) -> Tensor:
    """The weight that the layers of a parameter multiply with: itself, or what 4 bits stand for."""
    state: Any = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.data
    from bitsandbytes.functional import dequantize_4bit  # it takes seconds to import

    return dequantize_4bit(parameter.data, state)
