"""Which model a run takes, and what it changes in its configuration, as options and recipes write it.

Neither torch nor transformers is needed.
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

# In this order: what reads as a number is one (YAML takes 1e6 for a text).
Scalar = Annotated[StrictBool | StrictInt | float | str, Field(union_mode="left_to_right")]


def to_arguments(overrides: Mapping[str, Any]) -> list[str]:
    """The overrides as they stand on a command line: KEY=VALUE each."""
    return [f"{key}={value}" for key, value in overrides.items()]


def from_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """The inverse of `to_arguments`.

    Raises:
        ConfigError: an argument is not KEY=VALUE, or the value is no YAML.
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


# tyro's own way to write a mapping depends on what its default holds, and could not empty it.
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
    """The folder that a model's path means, or the hub name that it is.

    Args:
        path: a local folder, builtin:NAME for a model that ships with the package, or a hub name.

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
                    way = f"name the model that they are for, and --lora.path {shlex.quote(str(folder))} beside it"
                    raise ModelError(f"policy.path: {folder} holds adapters and no model: {way}")
                there = f": {folder / 'model'} does" if (folder / "model" / "config.json").is_file() else ""
                raise ModelError(f"policy.path: {folder} holds no config.json, so no Hugging Face model{there}")
            return str(folder)
        return path


def on_hub(path: str) -> bool:
    """Whether a model's path is a hub name. Raises ModelError as `located` does."""
    return not Path(located(path)).is_dir()
