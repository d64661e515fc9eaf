"""Sources of questions: arguments in their names, builtin:NAME?difficulty=3&size=small, and settings per source."""

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

import tyro
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from exgrpo.train.common.errors import ConfigError, DataError, nearest, shown
from exgrpo.train.common.plain import parse_yaml
from exgrpo.train.config.section import Section, StopString, Text

ColumnNames = dict[Literal["question", "answer", "solution"], Annotated[str, Field(min_length=1)]]


class SourceConfig(Section):
    """Settings of one source of questions; None takes the common option."""

    source: str = Field(description="The source, as data.train or data.test has it.")
    columns: ColumnNames | None = Field(None, description="Its column names, in place of data.columns.")
    prompt_format: Text | None = Field(None, description="Prompt format, in place of data.prompt_format.")
    reward: str | None = Field(
        None, min_length=1, description="Reward, in place of the one that it brings; as reward.function."
    )
    stop: tuple[StopString, ...] | None = Field(
        None, description="Strings that end an answer to its questions, in place of rollout.stop."
    )


SourceConfigs = Annotated[tuple[SourceConfig, ...], tyro.conf.Suppress]


def settings_of(source: str, settings: Sequence[SourceConfig]) -> SourceConfig:
    """Return the settings of a source."""
    return next((one for one in settings if one.source == source), SourceConfig(source=source))


def names_of(source: str, options: Any) -> Mapping[str, str]:
    """Return a source's column names, from such options as `data` and their `sources`."""
    own = settings_of(source, options.sources).columns
    return {**(options.columns if own is None else own)}


def check_sources(settings: Sequence[SourceConfig], sources: Collection[str]) -> None:
    """Raise ConfigError for settings of a source that does not exist, or of one twice."""
    named = [one.source for one in settings]
    for source in named:
        if source not in sources:
            raise ConfigError(
                f"data.sources has settings of {shown(source)}, and the sources of this run are "
                f"{shown(', '.join(sources))}: remove the entry, or name the source"
            )
        if named.count(source) > 1:
            raise ConfigError(f"data.sources has settings of {shown(source)} twice: put them into one entry")


def split_arguments(source: str) -> tuple[str, dict[str, Any]]:
    """Return the part before the first "?", and the arguments after it, written as in a URL, with YAML values.

    Raises:
        DataError: what follows the "?" is not NAME=VALUE&NAME=VALUE, a value is not YAML, or a name comes twice.
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
    """Return the parameters of a function or a dataclass with their types, without those in `own`."""
    found = inspect.signature(function, eval_str=True).parameters.values()
    named = [one for one in found if one.name not in own and one.kind is not one.VAR_KEYWORD]
    return {one.name: Any if one.annotation is one.empty else one.annotation for one in named}


def checked(source: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments of a source to the types of its parameters: a list to a tuple, an integer to a float.

    Raises:
        DataError: an argument is unknown or has another type; the message names the source.
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
        # Validated as JSON, whose arrays are accepted for tuples.
        return TypeAdapter(kind).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise DataError(f"{source}: {name}: {problem} (got {shown(value)})") from None
    except PydanticUserError:  # a type that pydantic cannot validate
        return value
