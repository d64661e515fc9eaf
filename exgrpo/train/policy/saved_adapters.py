"""Adapters that a run begins with: read from peft's folder, held against the model, and put into it."""

from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from exgrpo.train.errors import ModelError, shown
from exgrpo.train.policy.adapter_folder import FILE, adapter_config
from exgrpo.train.policy.adapters import BASE_WEIGHT, NAME, add_adapters, base_name, is_adapter
from exgrpo.train.policy.settings import LoraConfig
from exgrpo.train.pretrained.source import ModelSource

READ = frozenset(
    {"peft_type", "r", "lora_alpha", "target_modules", "base_model_name_or_path", "revision", "task_type"}
    | {"auto_mapping", "peft_version", "inference_mode", "lora_dropout", "eva_config", "runtime_config"}
)
"""Of adapter_config.json: what is read, and what says nothing of the adapters. They are trained without dropout."""
STARTS = ("gaussian", "orthogonal", "eva")
"""Ways to begin that leave the model's own weights as they are, beside true and false."""
PREFIX = "base_model.model."
"""Before the names of the model's parameters in peft's files."""
SHOWN_NAMES = 3


def check_adapters(options: LoraConfig, source: ModelSource) -> None:
    """Whether the adapters in `options.path` belong to a model; its weights are not read.

    Args:
        options: of the adapters, as `with_saved` gives them.
        source: the model.

    Raises:
        ConfigError: peft is not installed, or the model has no such layers.
        ModelError: they are for another model, of a kind that is not trained here, or their weights are not those that
            the model needs.
    """
    assert options.path is not None
    saved = adapter_config(options.path)
    model = source.empty()
    add_adapters(model, options, seed=0)
    base = saved.get("base_model_name_or_path")
    if base and Path(base).name.lower() != Path(source.path).name.lower():
        raise ModelError(
            f"lora.path: the adapters in {options.path} are for {shown(base)}, and policy.path is {source.path}: take "
            f"their model; if this is it by another name, write that name into base_model_name_or_path in {FILE}"
        )
    if other := _features(saved):
        raise ModelError(
            f"lora.path: the adapters in {options.path} have {', '.join(other)}: these are not trained here"
        )
    read_adapters(options.path, model)


def load_adapters(folder: str, model: PreTrainedModel) -> None:
    """Put saved adapters in the place of those that `add_adapters` has made; before ZeRO-3 cuts them.

    All ranks call it together.

    Raises:
        ModelError: they are not those that the model needs, or were trained beside another head.
    """
    weights = read_adapters(folder, model)
    for name, parameter in model.named_parameters():
        if name not in weights:
            continue
        if is_adapter(name):
            parameter.data.copy_(weights[name])
            continue
        with deepspeed.zero.GatheredParameters([parameter]):
            same = torch.equal(parameter.data.cpu(), weights[name].to(parameter.dtype))
        if not same:
            raise ModelError(f"lora.path: {folder} has another {base_name(name)} than the model: take its own model")


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

    Beside adapters of the head, peft also saves the head's own weight, which comes with them.

    Args:
        folder: of the adapters.
        model: with such adapters, whole or on the meta device.

    Raises:
        ModelError: a weight is missing, left over, of another shape or not finite; the message names it.
    """
    found = _read(folder)
    places = {
        PREFIX + name.replace(f".{NAME}.", "."): (name, parameter)
        for name, parameter in model.named_parameters()
        if is_adapter(name) or name.endswith(BASE_WEIGHT)
    }
    shapes = {key: (list(found[key].shape), _shape(places[key][1])) for key in found.keys() & places.keys()}
    kinds = {
        "missing weights": [key for key, (name, _) in places.items() if is_adapter(name) and key not in found],
        "weights that the model has no place for": list(found.keys() - places.keys()),
        "weights of another shape": [
            f"{key} {its} instead of {own}" for key, (its, own) in shapes.items() if its != own
        ],
        "NaN or infinity in": [key for key, weight in found.items() if not weight.isfinite().all()],
    }
    if problem := "; ".join(f"{kind}: {_shortened(keys)}" for kind, keys in kinds.items() if keys):
        raise ModelError(f"lora.path: the adapters in {folder} do not fit the model: {problem}")
    return {places[key][0]: weight for key, weight in found.items()}


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


def _shape(parameter: nn.Parameter) -> list[int]:
    """Of the whole, where ZeRO-3 has cut it."""
    return list(getattr(parameter, "ds_shape", parameter.shape))


def _features(saved: dict[str, Any]) -> list[str]:
    """What the adapters have beside products A and B of one scale alpha / rank."""
    from peft import LoraConfig as Plain

    plain = Plain().to_dict()
    differ = {key: value for key, value in saved.items() if key not in READ and value and value != plain.get(key)}
    if differ.get("init_lora_weights") in STARTS:
        del differ["init_lora_weights"]
    return [f"{key}={shown(value)}" for key, value in sorted(differ.items())]


def _shortened(names: list[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - SHOWN_NAMES} more" if len(listed) > SHOWN_NAMES else ""
    return ", ".join(listed[:SHOWN_NAMES]) + more
