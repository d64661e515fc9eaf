"""The tables of docs/methods.md are those of the code."""

import inspect
import re
from functools import cached_property
from pathlib import Path

import pytest

from exgrpo.train.common.columns import COLUMNS
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.replay.candidates import Candidates

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
TAKEN = {"candidates": Candidates, "batch": StepBatch}
"""What functions take, by the name that the page gives it."""


def table(name):
    """The columns of one of them, in Markdown."""
    rows = [f"| `{name}.{column}` | {meaning} |" for column, meaning in columns(TAKEN[name])]
    return "\n".join([f"| of `{name}` | what it is |", "|---|---|", *rows])


def columns(of):
    """The attributes of a class by its docstring or the table of columns, then its properties by theirs."""
    text = inspect.getdoc(of) or ""
    listed = text.partition("Attributes:\n")[2].partition("\n\n")[0]
    for column, meaning in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", listed, re.MULTILINE):
        yield column, _line(meaning)
    if of is StepBatch:
        axes = {"group": "[G]", "row": "[N]", "token": "[T]"}
        yield from ((name, f"{axes[one.axis]} {one.meaning}") for name, one in COLUMNS.items())
    for parent in reversed(of.__mro__[:-1]):
        for column, value in vars(parent).items():
            if isinstance(value, property | cached_property):
                yield column, _line(value.__doc__ or "")


def _line(meaning):
    return " ".join(meaning.split()).rstrip(".")


@pytest.mark.parametrize("name", TAKEN)
def test_the_page_has_every_column(name):
    assert table(name) in PAGE, f"the page needs\n{table(name)}"
