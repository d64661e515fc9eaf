"""The columns that functions of a method read, as the tables of docs/methods.md: `python -m tests.docs.columns`."""

import inspect
import re
from collections.abc import Iterator
from functools import cached_property

from exgrpo.train.experience.units import Units
from exgrpo.train.experience.weighing import ReplayedAnswer
from exgrpo.train.records import Group, Trajectory

TAKEN = {"units": Units, "answer": ReplayedAnswer, "group": Group, "row": Trajectory}
"""What functions take, or find in it, by the name that the page gives it."""


def table(name: str) -> str:
    """The columns of one of them, in Markdown."""
    rows = [f"| `{name}.{column}` | {meaning} |" for column, meaning in columns(TAKEN[name])]
    return "\n".join([f"| of `{name}` | what it is |", "|---|---|", *rows])


def columns(of: type) -> Iterator[tuple[str, str]]:
    """The attributes of a class by its docstring, then its properties by theirs."""
    text = inspect.getdoc(of) or ""
    listed = text.partition("Attributes:\n")[2].partition("\n\n")[0]
    for column, meaning in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", listed, re.MULTILINE):
        yield column, _line(meaning)
    for parent in reversed(of.__mro__[:-1]):
        for column, value in vars(parent).items():
            if isinstance(value, property | cached_property):
                yield column, _line(value.__doc__ or "")


def _line(meaning: str) -> str:
    return " ".join(meaning.split()).rstrip(".")


if __name__ == "__main__":
    print("\n\n".join(map(table, TAKEN)))
