"""Rules that a configuration names: each is one entry of a table, and the table's keys are the names."""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def look_up(table: Mapping[str, T], name: str, kind: str) -> T:
    """The entry of that name.

    Raises:
        ValueError: there is none; the message says what `kind` of name it is, and lists the names.
    """
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}; expected one of {', '.join(table)}")
    return table[name]
