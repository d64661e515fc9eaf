"""Arguments in the name of a source of questions: builtin:NAME?difficulty=3&size=small."""

import inspect
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any
from urllib.parse import parse_qsl

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from exgrpo.train.errors import ConfigError, DataError, nearest, shown
from exgrpo.train.plain import parse_yaml


def split_arguments(source: str) -> tuple[str, dict[str, Any]]:
    """The part before the first "?", and the arguments behind it, written as in a URL; their values are YAML.

    Raises:
        DataError: what follows the "?" is not NAME=VALUE&NAME=VALUE, a value is no YAML, or a name comes twice.
    """
    place, mark, query = source.partition("?")
    if not mark:
        return place, {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
    except ValueError as error:
        raise DataError(f"{source}: arguments are written NAME=VALUE&NAME=VALUE: {shown(error)}") from None
    arguments: dict[str, Any] = {}
    for name, text in pairs:
        if name in arguments:
            raise DataError(f"{source}: the argument {shown(name)} comes twice")
        try:
            arguments[name] = parse_yaml(text)
        except ConfigError as error:
            raise DataError(f"{source}: {shown(name)}: {error}") from None
    return place, arguments


def parameters(function: Callable[..., Any], own: Collection[str]) -> dict[str, Any]:
    """The parameters of a function and their types, without those that it gets anyway."""
    found = inspect.signature(function, eval_str=True).parameters.values()
    named = [one for one in found if one.name not in own and one.kind is not one.VAR_KEYWORD]
    return {one.name: Any if one.annotation is one.empty else one.annotation for one in named}


def checked(source: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a source as its parameters have them: a list as a tuple, a whole number as a float.

    Args:
        source: names itself in messages.
        given: arguments by name.
        known: types by name.

    Raises:
        DataError: one is unknown, or of another type.
    """
    for name in given:
        if name not in known:
            near = nearest(name, known)
            meant = f"; did you mean {near!r}?" if near else ""
            there_is = f"there is {', '.join(known)}" if known else "it takes none"
            raise DataError(f"{source}: unknown argument {shown(name)}{meant} ({there_is})")
    return {name: _typed(source, name, value, known[name]) for name, value in given.items()}


def _typed(source: str, name: str, value: Any, kind: Any) -> Any:
    try:
        # As JSON, since its arrays may be tuples.
        return TypeAdapter(kind).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise DataError(f"{source}: {name}: {problem} (got {shown(value)})") from None
    except PydanticUserError:  # a type that no value can be checked against
        return value
