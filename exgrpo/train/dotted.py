"""Dotted keys: "experience.ratio" is the value `ratio` of the section `experience`."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel


def joined(names: Iterable[object]) -> str:
    """The key of a value, from the names of its sections and its own name."""
    return ".".join(map(str, names))


def flat(section: Mapping[str, Any] | BaseModel) -> dict[str, Any]:
    """The values of a nested section by dotted key.

    The sections of a model are models: its mappings are values. The sections of a mapping are mappings.
    """
    kind = BaseModel if isinstance(section, BaseModel) else dict
    values: dict[str, Any] = {}
    for name, value in dict(section).items():
        if isinstance(value, kind):
            values |= {joined((name, key)): inner for key, inner in flat(value).items()}
        else:
            values[str(name)] = value
    return values


def known_keys(model: type[BaseModel]) -> list[str]:
    """The dotted keys of all sections and values that a model may have."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += [joined((name, key)) for key in known_keys(field.annotation)]
    return keys
