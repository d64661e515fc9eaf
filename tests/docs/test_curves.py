"""The page on curves speaks of numbers that runs write."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def named(page):
    """The names in the first column of its tables."""
    cells = re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_every_curve_is_one_of_the_metrics():
    curves, metrics = named((DOCS / "curves.md").read_text()), named((DOCS / "metrics.md").read_text())
    assert len(curves) > 20
    assert {re.sub(r"/8$", "/K", name) for name in curves} <= set(metrics)
