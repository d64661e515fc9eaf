"""LoRA (arXiv 2106.09685) by peft: adapters in a causal LM whose own weights stay as they are.

What is pushed to an engine and saved as a model is W + s B A of each adapted layer, under the name of its W.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from exgrpo.train.errors import ConfigError
from exgrpo.train.policy.settings import LoraConfig
from exgrpo.train.seeds import derive_seed

NAME = "default"
"""Of the adapter, as peft calls one that was given no name."""
BASE_WEIGHT = ".base_layer.weight"
"""How the name of an adapted layer's own weight ends."""


@dataclass(frozen=True, eq=False)
class AdaptedLayer:
    """A linear layer with an adapter.

    Attributes:
        down: A [rank, in].
        up: B [out, rank].
        scale: s = alpha / rank.
    """

    down: nn.Parameter
    up: nn.Parameter
    scale: float

    def added_to(self, weight: Tensor) -> Tensor:
        """W + s B A, rounded once to the dtype of W [out, in]; both parameters have to be whole."""
        change = self.scale * (self.up.data.float() @ self.down.data.float())
        return (weight.float() + change).to(weight.dtype)


def add_adapters(model: PreTrainedModel, options: LoraConfig, seed: int) -> None:
    """Add adapters that change nothing yet, and freeze all other weights.

    Args:
        model: its parameters may be partitioned by ZeRO-3.
        options: of the run.
        seed: of the run; all ranks draw the same numbers.

    Raises:
        ConfigError: peft is not installed, or the model has no such layers.
    """
    try:
        import peft
    except ImportError:
        raise ConfigError("lora.rank: adapters need peft: pip install 'exgrpo[lora]'") from None
    targets = list(options.targets) or linear_layers(model)
    head = _head_name(model)
    if options.head:
        targets.append(head)
    adapted = any(f".{head}".endswith(f".{target}") for target in targets)
    if adapted and model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        raise ConfigError("lora.head: the head of this model is its embedding, which has no adapter; leave it out")
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "adapters"))
        try:
            model.add_adapter(peft.LoraConfig(r=options.rank, lora_alpha=options.alpha, target_modules=targets), NAME)
        except ValueError as error:
            raise ConfigError(f"lora.targets: {error}") from None
    others = [name for name, layer in _with_adapters(model) if not isinstance(layer.base_layer, nn.Linear)]
    if others:
        raise ConfigError(f"lora.targets: {', '.join(others)}: no linear layer; leave it out")


def linear_layers(model: PreTrainedModel) -> list[str]:
    """The last parts of the names of all linear layers but the head."""
    head = model.get_output_embeddings()
    linear = (n for n, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head)
    return sorted({name.rpartition(".")[2] for name in linear})


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLayer]:
    """The layers with an adapter, by name."""
    return {
        name: AdaptedLayer(layer.lora_A[NAME].weight, layer.lora_B[NAME].weight, layer.scaling[NAME])
        for name, layer in _with_adapters(model)
    }


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is one of an adapter."""
    return ".lora_" in name


def base_name(name: str) -> str:
    """What the model without adapters calls one of its parameters."""
    return name.replace(".base_layer.", ".")


def whole_adapters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of every parameter of the adapters; all ranks must run through them together."""
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.data


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model computes here as if it had no adapters: they are multiplied by 0, so ZeRO-3 sees the same layers."""
    scales = {layer: layer.scaling[NAME] for _, layer in _with_adapters(model)}
    for layer in scales:
        layer.scaling[NAME] = 0.0
    try:
        yield
    finally:
        for layer, scale in scales.items():
            layer.scaling[NAME] = scale


def _with_adapters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))


def _head_name(model: PreTrainedModel) -> str:
    head = model.get_output_embeddings()
    return next(name for name, module in model.named_modules() if module is head)
