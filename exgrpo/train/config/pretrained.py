"""Locate the model of a run, and parse overrides of its configuration from options and recipes.

Needs neither torch nor transformers.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt
from tyro.constructors import PrimitiveConstructorSpec

from exgrpo.train.common.errors import ConfigError, ModelError, os_errors_as, shown
from exgrpo.train.common.functions import ASSETS, PREFIX, model_names
from exgrpo.train.common.plain import parse_yaml

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

    Args:
        path: a local folder, builtin:NAME for a model of this package, or a hub name.

    Raises:
        ModelError: it is none of them, or the folder holds no model.
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
