"""Overrides of a model's configuration as options and recipes write them; neither torch nor transformers is needed."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt
from tyro.constructors import PrimitiveConstructorSpec

from exgrpo.train.errors import ConfigError, shown
from exgrpo.train.plain import parse_yaml

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
