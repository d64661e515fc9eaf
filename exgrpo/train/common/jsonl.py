"""Lines of JSON, of files that people give and of those of a run."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from exgrpo.train.common import plain
from exgrpo.train.common.errors import shown


class Line(NamedTuple):
    """A line that is not empty.

    Attributes:
        number: from 1, empty lines counted.
        value: that it holds; None where it is no JSON.
        problem: why it is none; empty: it is.
    """

    number: int
    value: Any
    problem: str = ""


def parsed(lines: Iterable[str | bytes], parse: Callable[[str | bytes], Any] = plain.parse_json) -> Iterator[Line]:
    """The values of lines; `parse` raises a ValueError at what is none."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield Line(number, parse(line))
        except (ValueError, RecursionError) as error:
            place = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else shown(error)
            yield Line(number, None, f"not valid JSON: {place}")


def read_log(path: Path) -> Iterator[Line]:
    """The lines of a file that a run appends to; what is cut or damaged has a problem, and what is behind it is read.

    Raises:
        OSError: it cannot be read.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from parsed(file, json.loads)  # not `plain`: texts of models may hold half of a surrogate pair
