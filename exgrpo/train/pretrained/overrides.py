"""Values of a model's configuration that a run changes, in the place of an edited copy of the model."""

import copy
import difflib
from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from exgrpo.train.errors import ConfigError, shown

ROPE, LEGACY_ROPE = "rope_parameters", ("rope_theta", "rope_scaling")


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
        homes = [home for home in (known, rope) if name in home]
        if not homes:
            near = difflib.get_close_matches(key, [*known, *config.attribute_map, *rope], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"overrides: the configuration of a {config.model_type!r} model has no {shown(key)}{hint}"
            )
        for home in homes:
            _check_kind(key, home[name], value)
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


def changes(before: PreTrainedConfig, after: PreTrainedConfig) -> dict[str, Any]:
    """The values at the top level of a configuration that have changed, whole: what vLLM takes as `hf_overrides`."""
    old = before.to_dict()
    return {key: value for key, value in after.to_dict().items() if key not in old or old[key] != value}


def _check_kind(key: str, old: Any, new: Any) -> None:
    if old is not None and _kind(old) != _kind(new):
        raise ConfigError(f"overrides: {key} is {_kind(old)} in the model's configuration, and {shown(new)} is not")


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a text"}
    return kinds.get(type(value), f"a {type(value).__name__}")
