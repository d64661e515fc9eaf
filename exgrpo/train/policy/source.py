"""Source of a model, and its configuration with the changes of the run; nothing else reads it."""

import copy
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from exgrpo.train.common.errors import SHOWN, ConfigError, ModelError, cut, shown
from exgrpo.train.common.limits import MOST_LAYERS
from exgrpo.train.config.policy import located

CAUSAL = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
"""The classes of transformers that predict the next token."""
SENSES = ("vision", "image", "audio", "vq")
"""In the names of the parts of a configuration that are not about text."""
ROPE, LEGACY_ROPE = "rope_parameters", ("rope_theta", "rope_scaling")


@dataclass(frozen=True, eq=False)
class ModelSource:
    """A causal LM that can be loaded.

    Attributes:
        path: folder or hub name for `from_pretrained`.
        config: its configuration, with the overrides in it.
        overrides: what the run changes in the configuration, as it was given.
        changes: the values at the top level of `config` that differ for it from the model's own, whole: what vLLM takes
            as `hf_overrides`.
    """

    path: str
    config: PreTrainedConfig
    overrides: Mapping[str, Any]
    changes: Mapping[str, Any]

    @property
    def positions(self) -> int | None:
        """The longest sequence that the model is made for; None where its configuration sets no bound."""
        text = self.config.get_text_config()
        positions = getattr(text, "max_position_embeddings", None)
        rope = getattr(text, "rope_parameters", None) or {}
        # With the other kinds of scaling max_position_embeddings is what comes out of it.
        stretched = rope.get("rope_type") in ("linear", "dynamic")
        return int(positions * rope["factor"]) if positions and stretched else positions

    def empty(self) -> PreTrainedModel:
        """The model without its weights, on the meta device.

        Raises:
            ModelError: it is no causal LM that transformers knows.
        """
        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(self.config, trust_remote_code=False)
        except Exception as error:  # of whatever kind: the sizes may be those of no model
            raise explained(error, self.path) from error

    def load(self, dtype: torch.dtype, attention: str, quantisation: Any = None) -> PreTrainedModel:
        """The model with its weights, sharded where an HfDeepSpeedConfig says so; `check_weights` has to come first.

        Args:
            dtype: of weights that are not quantised.
            attention: implementation of transformers.
            quantisation: as transformers describes it.

        Raises:
            ModelError: it has no such attention here, or its files cannot be read.
        """
        try:
            return AutoModelForCausalLM.from_pretrained(
                self.path,
                config=self.config,
                dtype=dtype,
                attn_implementation=attention,
                trust_remote_code=False,
                quantization_config=quantisation,
            )
        except (ImportError, OSError, ValueError) as error:
            raise explained(error, self.path) from error


def find_model(path: str, overrides: Mapping[str, Any] | None = None) -> ModelSource:
    """Find a model and read its configuration; no weights are read.

    Args:
        path: a local folder, builtin:NAME for a model that ships with the package, or a hub name.
        overrides: values of its configuration that are changed.

    Raises:
        ModelError: the model is missing, needs code of its own, or is no causal LM for text.
        ConfigError: an override does not suit it.
    """
    path = located(path)
    try:
        raw, _ = PreTrainedConfig.get_config_dict(path)
        _check_layers(raw)
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # of whatever kind: a file that is no configuration may hold anything
        raise explained(error, path) from error
    if other := _other_kind(config, raw):
        raise ModelError(f"policy.path: {shown(path)} {other}: take a causal LM for text")
    return _source(path, config, raw, overrides or {})


def _other_kind(config: PreTrainedConfig, raw: Mapping[str, Any]) -> str:
    """Describe a model that is no causal LM for text; empty if it may be one."""
    parts = [part for part in config.sub_configs if any(sense in part for sense in SENSES)]
    if parts:
        return f"({config.model_type}) is for more than text, see {' and '.join(sorted(parts))} in its configuration"
    if config.is_encoder_decoder:
        return f"({config.model_type}) has an encoder for its input"
    heads = raw.get("architectures") or []
    if not isinstance(heads, list) or not all(isinstance(head, str) for head in heads):
        return f"names no class in its architectures, {shown(heads)}"
    return "" if not heads or CAUSAL.intersection(heads) else f"has the head of {' and '.join(heads)}"


def explained(error: Exception, path: str) -> ModelError:
    """Why a model or its tokenizer cannot be loaded, in one line."""
    text = str(error)
    first = text.partition("\n")[0]
    if "trust_remote_code" in text:
        return ModelError(
            f"policy.path: {shown(path)} needs code of its own, and code from model folders is not run: take a "
            "model of a type that transformers knows"
        )
    if "attn_implementation" in text:
        return ModelError(
            f"policy.attention: transformers {transformers.__version__} has no sdpa for the model in {shown(path)}: "
            "take policy.attention eager, or rollout.engine vllm"
        )
    plain = isinstance(error, OSError | ValueError | StrictDataclassError)  # written for people
    reason = cut(first, SHOWN) if plain else f"{type(error).__name__}: {cut(first, SHOWN)}"
    return ModelError(f"policy.path: {shown(path)} cannot be loaded: {reason}")


def _check_layers(raw: Mapping[str, Any]) -> None:
    """A configuration lists something for each layer, so a number of layers that is none would take all memory."""
    for key, value in raw.items():
        if isinstance(value, Mapping):
            _check_layers(value)
        elif "layer" in key and isinstance(value, int) and value > MOST_LAYERS:
            raise ValueError(f"{key} is {shown(value)}, and no model has more than {MOST_LAYERS} layers")


def _source(path: str, config: PreTrainedConfig, raw: dict[str, Any], overrides: Mapping[str, Any]) -> ModelSource:
    changed = overridden(config, raw, overrides) if overrides else config
    old = config.to_dict()
    changes = {key: value for key, value in changed.to_dict().items() if key not in old or old[key] != value}
    return ModelSource(path, changed, overrides, changes)


def overridden(config: PreTrainedConfig, raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration that a config.json with these values in it gives.

    Args:
        config: what the unchanged file gives.
        raw: the content of the file.
        overrides: values by key. A key of `rope_parameters`, such as rope_theta, is changed there, where transformers
            takes it from, wherever the file has it.

    Raises:
        ConfigError: the configuration has no such key, or no place for such a value; the message names it.
    """
    rope = dict(getattr(config, ROPE, None) or {})
    known = config.to_dict()
    values = copy.deepcopy(dict(raw))
    for key, value in overrides.items():
        name = config.attribute_map.get(key, key)
        if name not in known and name not in rope:
            near = difflib.get_close_matches(key, [*known, *config.attribute_map, *rope], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"overrides: the configuration of a {config.model_type!r} model has no {shown(key)}{hint}"
            )
        if name in rope:
            rope[name] = value
            values = {ROPE: rope, **{k: v for k, v in values.items() if k not in (ROPE, *LEGACY_ROPE)}}
        if name in known:
            values[name] = value
    try:
        changed = type(config).from_dict(values, name_or_path=config.name_or_path)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ConfigError(f"overrides: {shown(error, 1000)}") from None
    new_rope = getattr(changed, ROPE, None) or {}
    for key, value in overrides.items():
        found = new_rope[key] if key in new_rope else getattr(changed, key, None)
        if found != value:
            raise ConfigError(
                f"overrides: {key}={value} has no effect on this configuration, which keeps {shown(found)}"
            )
    return changed
