"""Read lines of JSON, from users' files and from those of a run."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from exgrpo.train.common import plain
from exgrpo.train.common.errors import shown


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


def parsed(lines: Iterable[str | bytes], parse: Callable[[str | bytes], Any] = plain.parse_json) -> Iterator[Line]:
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
    """Yield the lines of a file that a run appends to; damaged lines have a problem, and later ones are still read.

    Raises:
        OSError: it cannot be read.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from parsed(file, json.loads)  # not `plain`: texts of models may contain lone surrogates
