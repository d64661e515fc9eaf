"""LoRA (arXiv 2106.09685) by peft: adapters in a causal LM whose own weights stay as they are, new ones or saved ones.

What is pushed to an engine and saved as a model is W + s B A of each adapted layer, under the name of its W.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from exgrpo.train.common.errors import ConfigError, ModelError, shown
from exgrpo.train.common.seeds import derive_seed
from exgrpo.train.config.policy import ADAPTER_FILE, LoraConfig, saved_adapters
from exgrpo.train.policy.check import listed
from exgrpo.train.policy.source import ModelSource

NAME = "default"
"""Of the adapter, as peft calls one that was given no name."""
BASE_WEIGHT = ".base_layer.weight"
"""How the name of an adapted layer's own weight ends."""
IGNORED = frozenset(
    {"revision", "task_type", "auto_mapping", "peft_version", "inference_mode", "lora_dropout"}
    | {"eva_config", "runtime_config"}
)
"""Of adapter_config.json: what says nothing of the adapters. They are trained without dropout."""
STARTS = ("gaussian", "orthogonal", "eva")
"""Ways to begin that keep the weights of the model, in addition to true and false."""
PREFIX = "base_model.model."
"""Before the names of the model's parameters in peft's files."""


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
    """Add adapters that change nothing yet, and freeze all other weights; all ranks draw the same numbers.

    Raises:
        ConfigError: peft is not installed, or the model has no such layers.
    """
    try:
        import peft
    except ImportError:
        raise ConfigError("lora.rank: adapters need peft: pip install 'exgrpo[lora]'") from None
    output = model.get_output_embeddings()
    head = next(name for name, module in model.named_modules() if module is output)
    targets = list(options.targets) or linear_layers(model)
    if options.head:
        targets.append(head)
    adapted = any(f".{head}".endswith(f".{target}") for target in targets)
    if adapted and output.weight is model.get_input_embeddings().weight:
        raise ConfigError("lora.head: the head of this model is its embedding, which has no adapter; leave it out")
    model.requires_grad_(False)
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=targets,
        base_model_name_or_path=model.name_or_path,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "adapters"))
        try:
            # By peft alone: add_adapter of transformers 5.24 demands a peft that is not out.
            peft.inject_adapter_in_model(config, model, NAME)
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
    """Return True if a parameter of this name belongs to an adapter."""
    return ".lora_" in name


def base_name(name: str) -> str:
    """Return the name of a parameter in the model without adapters."""
    return name.replace(".base_layer.", ".")


def whole_adapters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of every parameter of the adapters; all ranks must run through them together."""
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.data


def _with_adapters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))


def check_adapters(options: LoraConfig, source: ModelSource) -> None:
    """Check that adapters fit a model, by the options of `with_saved`; its weights are not read.

    Raises:
        ConfigError: peft is not installed, or the model has no such layers.
        ModelError: they are for another model, of a kind that is not trained here, or their weights are not those that
            the model needs.
    """
    assert options.path is not None
    saved = saved_adapters(options.path)
    model = source.empty()
    add_adapters(model, options, seed=0)
    base = saved.base_model_name_or_path
    if base and Path(base).name.lower() != Path(source.path).name.lower():
        raise ModelError(
            f"lora.path: the adapters in {options.path} are for {shown(base)}, and policy.path is {source.path}: take "
            "their model; if this is it by another name, write that name into base_model_name_or_path in "
            f"{ADAPTER_FILE}"
        )
    if other := _features(saved.model_extra or {}):
        raise ModelError(
            f"lora.path: the adapters in {options.path} have {', '.join(other)}: these are not trained here"
        )
    read_adapters(options.path, model)


def load_adapters(folder: str, model: PreTrainedModel) -> None:
    """Put saved adapters in the place of those that `add_adapters` has made; before ZeRO-3 cuts them.

    All ranks call it together.

    Raises:
        ModelError: see `read_adapters`; or they were trained with another head.
    """
    weights = read_adapters(folder, model)
    heads = {key.removeprefix(PREFIX): weight for key, weight in _read(folder).items() if key.endswith(BASE_WEIGHT)}
    for name, parameter in model.named_parameters():
        if name in weights:
            parameter.data.copy_(weights[name])
        if name in heads:
            with deepspeed.zero.GatheredParameters([parameter]):
                same = torch.equal(parameter.data.cpu(), heads[name].to(parameter.dtype))
            if not same:
                raise ModelError(
                    f"lora.path: {folder} has another {base_name(name)} than the model: take its own model"
                )


def adapted_model(source: ModelSource, options: LoraConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """A model with saved adapters, which stay in fp32; see `check_adapters`, which has to come first."""
    assert options.path is not None
    model = source.load(dtype, attention)
    add_adapters(model, options, seed=0)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()
    load_adapters(options.path, model)
    return model


def read_adapters(folder: str, model: nn.Module) -> dict[str, Tensor]:
    """The weights of saved adapters by the names of a model's parameters.

    Beside adapters of the head, peft also saves the head's own weight, which is left out. The model has such adapters,
    whole or on the meta device.

    Raises:
        ModelError: a weight is missing, left over, of another shape or not finite; the message names it.
    """
    found = {key: weight for key, weight in _read(folder).items() if not key.endswith(BASE_WEIGHT)}
    places = {_key(name): (name, parameter) for name, parameter in model.named_parameters() if is_adapter(name)}
    both = found.keys() & places.keys()
    shapes = {key: (list(found[key].shape), list(places[key][1].shape)) for key in both}
    kinds = {
        "missing weights": places.keys() - both,
        "weights that the model has no place for": found.keys() - both,
        "weights of another shape": [
            f"{key} {its} instead of {own}" for key, (its, own) in shapes.items() if its != own
        ],
        "NaN or infinity in": [key for key, weight in found.items() if not weight.isfinite().all()],
    }
    if problem := listed(kinds):
        raise ModelError(f"lora.path: the adapters in {folder} do not fit the model: {problem}")
    return {places[key][0]: weight for key, weight in found.items()}


def save_adapters(folder: Path, model: Any, weights: Mapping[str, Tensor]) -> None:
    """Write adapters as peft does, and how their model generates.

    Args:
        folder: made where it is missing.
        model: with the adapters.
        weights: their parameters by the model's names, whole.
    """
    from peft.utils import SAFETENSORS_WEIGHTS_NAME
    from transformers.utils import GENERATION_CONFIG_NAME

    model.peft_config[NAME].save_pretrained(folder)
    # Not by its own method, which refuses flags without effect, with which some models come.
    model.generation_config.to_json_file(folder / GENERATION_CONFIG_NAME)
    contiguous = {_key(name): weight.contiguous() for name, weight in weights.items()}
    save_file(contiguous, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})


def _key(name: str) -> str:
    """The name of an adapter's parameter in peft's files."""
    return PREFIX + name.replace(f".{NAME}.", ".")


def _read(folder: str) -> dict[str, Tensor]:
    from peft import load_peft_weights
    from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME

    place, files = Path(folder).expanduser(), (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)
    if not any((place / file).is_file() for file in files):  # peft would ask the hub
        raise ModelError(f"lora.path: {folder} holds no weights, neither {' nor '.join(files)}")
    try:
        return load_peft_weights(str(place), device="cpu")
    except Exception as error:  # of whatever kind: each format has errors of its own for what is damaged
        raise ModelError(f"lora.path: the weights in {folder} cannot be read: {shown(error)}") from None


def _features(saved: dict[str, Any]) -> list[str]:
    """Return the settings by which the adapters differ from products A B of one scale alpha / rank."""
    from peft import LoraConfig as Plain

    plain = Plain().to_dict()
    differ = {key: value for key, value in saved.items() if key not in IGNORED and value and value != plain.get(key)}
    if differ.get("init_lora_weights") in STARTS:
        del differ["init_lora_weights"]
    return [f"{key}={shown(value)}" for key, value in sorted(differ.items())]
