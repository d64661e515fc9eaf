"""Lines of JSON: of files that people give, where a wrong line is an error, and of a run, where it is left out."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from exgrpo.train.common import plain
from exgrpo.train.common.errors import DataError, os_errors_as, shown


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


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file that somebody gives, one a line, each with its place for messages.

    Raises:
        DataError: the file cannot be read, or a line holds something else; the message names file and line.
    """
    with os_errors_as(DataError, f"{path} cannot be read"), path.open("rb") as file:
        for line in parsed(file):
            place = f"{path} line {line.number}"
            if line.problem:
                raise DataError(f"{place}: {line.problem}; mend the line, or remove it")
            if not isinstance(line.value, dict):
                raise DataError(f"{place}: expected an object, got {type(line.value).__name__}; mend the line")
            yield place, line.value


def read_log(path: Path) -> Iterator[Line]:
    """The lines of a file that a run appends to; what is cut or damaged has a problem, and what is behind it is read.

    Raises:
        OSError: it cannot be read.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from parsed(file, json.loads)  # not `plain`: texts of models may hold half of a surrogate pair
