"""The tables of docs/methods.md are those of the code."""

from pathlib import Path

import pytest

from tests.docs.columns import TAKEN, table

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()


@pytest.mark.parametrize("name", TAKEN)
def test_the_page_has_every_column(name):
    assert table(name) in PAGE, "python -m tests.docs.columns prints the tables"
