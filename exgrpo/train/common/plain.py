"""Parse JSON, lines of JSON and YAML that may be damaged; YAML of a sane size and depth."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from exgrpo.train.common.errors import ConfigError, shown

MOST_VALUES, DEEPEST = 100_000, 20
"""Recipes have some dozens of values, four levels deep; with aliases a short text can expand to any number."""
LONGEST = 2**18
"""Characters. The parser takes some seconds for that many, and a file that is no recipe may be of any length."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is invalid, is nested more deeply or has a number of more digits than Python reads, or holds a
            lone surrogate, which cannot be encoded in UTF-8; a JSONDecodeError if the position is known.
    """
    try:
        value = json.loads(text)
        if isinstance(text, bytes) or "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which is no character") from None
    return value


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        ConfigError: it is invalid, too long, repeats a key, contains itself, has too many values, or a text that no
            file or program can take; the message does not name the source.
    """
    if len(text) > LONGEST:
        raise ConfigError(f"it has more than {LONGEST} characters, and no text of options is so long")
    try:
        value = _Loader(text).get_single_data()
    except RecursionError:
        raise ConfigError("not valid YAML: it is nested too deeply") from None
    except Exception as error:  # PyYAML's constructors may raise anything for a strange tag or date
        raise ConfigError(f"not valid YAML: {shown(error)}") from None
    _check(value)
    return value


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, but rejecting repeated keys, of which PyYAML takes the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Values merged by `<<` are added later, and may be overridden.
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"the key {shown(key.value)} comes twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return node


def _check(value: Any) -> None:
    """Check every value, once for each alias to it."""
    level: list[Any] = [value]
    seen = 0
    for _ in range(DEEPEST):
        seen += len(level)
        if seen > MOST_VALUES:
            raise ConfigError(f"it holds more than {MOST_VALUES} values, every alias counted")
        for text in level:
            if isinstance(text, str):
                _check_text(text)
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise ConfigError(f"it is nested more than {DEEPEST} levels deep, or holds itself by an alias")


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list | tuple | set) else ()


def _check_text(text: str) -> None:
    try:
        usable = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # a lone surrogate
        usable = False
    if not usable:
        raise ConfigError(f"the text {shown(text)} holds a character that no file or program can take")


class Line(NamedTuple):
    """A non-empty line.

    Attributes:
        number: line number from 1, empty lines counted.
        value: parsed value; None if it is not valid JSON.
        problem: reason why it is invalid; empty if valid.
    """

    number: int
    value: Any
    problem: str = ""


def parse_lines(lines: Iterable[str | bytes], parse: Callable[[str | bytes], Any] = parse_json) -> Iterator[Line]:
    """Yield the parsed non-empty lines; `parse` raises ValueError for invalid ones."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield Line(number, parse(line))
        except (ValueError, RecursionError) as error:
            place = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else shown(error)
            yield Line(number, None, f"not valid JSON: {place}")


def read_log(path: Path) -> Iterator[Line]:
    """Yield the lines of a file that a run appends to; damaged lines have a problem, and later ones are still read."""
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from parse_lines(file, json.loads)  # not `parse_json`: texts of models may contain lone surrogates
