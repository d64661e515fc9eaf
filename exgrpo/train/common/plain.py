"""JSON and YAML from people, whatever they hold: plain values, of YAML of a sane size and depth, or an error."""

import json
import os
from collections.abc import Iterable
from typing import Any

import yaml

from exgrpo.train.common.errors import ConfigError, shown

MOST_VALUES, DEEPEST = 100_000, 20
"""A recipe has some dozens of values, four levels deep; with aliases a short text can stand for any number."""
LONGEST = 2**18
"""Characters. The parser takes some seconds for so many, and a file that is no recipe may have any number."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, is nested more deeply or has a number of more digits than Python reads, or holds half of
            a surrogate pair, which no file can take; a JSONDecodeError where the place is known.
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
    """The value of a YAML text.

    Raises:
        ConfigError: it is no YAML, too long, has a key twice, holds itself, too many values, or a text that no file or
            program can take; the message is without the name of the text.
    """
    if len(text) > LONGEST:
        raise ConfigError(f"it has more than {LONGEST} characters, and no text of options is so long")
    try:
        value = _Loader(text).get_single_data()
    except RecursionError:
        raise ConfigError("not valid YAML: it is nested too deeply") from None
    except Exception as error:  # a converter of PyYAML may raise anything at a value with a strange tag or date
        raise ConfigError(f"not valid YAML: {shown(error)}") from None
    _check(value)
    return value


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader takes the last of several values of a key; YAML forbids that a key comes twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """See PyYAML; values that are merged (`<<`) come later, and may be replaced."""
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
    """Look at every value, once for each alias to it."""
    level: list[Any] = [value]
    seen = 0
    for _ in range(DEEPEST):
        seen += len(level)
        if seen > MOST_VALUES:
            raise ConfigError(f"it holds more than {MOST_VALUES} values, aliases counted where they stand")
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
    except UnicodeEncodeError:  # half of a surrogate pair
        usable = False
    if not usable:
        raise ConfigError(f"the text {shown(text)} holds a character that no file or program can take")
