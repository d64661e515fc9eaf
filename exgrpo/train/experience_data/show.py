"""Stored experience on a terminal: counts, distributions, and the answers to one question."""

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from exgrpo.train.experience_data.stored import AskedQuestion, Overview

BARS = "▁▂▃▄▅▆▇█"
BINS = 12
MEANINGS = {
    "age": "steps since the answer was written",
    "group accuracy": "successes among the answers of the group that it was written in",
    "success count": "of a question, by its latest group",
    "answers": "stored ones of a question",
    "solutions": "stored ones of a question that differ by their key",
}
QUANTILES = {"min": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "max": 1.0}


def show(overview: Overview, console: Console) -> None:
    """Print counts and distributions."""
    console.print(overview.title, style="bold", highlight=False, soft_wrap=True, markup=False)
    for name, count in counts(overview).items():
        console.print(f"{count:>10,}  {name}", highlight=False)
    if not len(overview.question):
        return
    # 80 columns are enough for names of 14 characters and numbers of 6.
    table = Table("", *QUANTILES, "mean", "histogram", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:-1]:
        column.justify = "right"
    for name, values in overview.distributions.items():
        quantiles = np.quantile(values, list(QUANTILES.values()))
        table.add_row(name, *map(_short, (*quantiles, values.mean())), bars(values))
    console.print(table)
    for name in filter(MEANINGS.__contains__, overview.distributions):
        console.print(f"{name}: {MEANINGS[name]}", style="dim", highlight=False)


def _short(value: float) -> str:
    """A number of at most six characters, if it is below a million."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{round(value, 3):.3g}"


def counts(overview: Overview) -> dict[str, int]:
    """What is counted, by name."""
    found = {
        "stored trajectories": len(overview.question),
        "questions with stored trajectories": len(np.unique(overview.question)),
        "questions in all": overview.asked,
        "questions that have left": overview.retired,
        **{f"log-probs by: {name}": count for name, count in overview.behaviour.items()},
    }
    return {name: count for name, count in found.items() if count is not None}


def bars(values: npt.NDArray[np.float64]) -> str:
    """A small histogram of values between the lowest and the highest; one character where all are equal."""
    if values.min() == values.max():
        return BARS[-1]
    heights, _ = np.histogram(values, BINS)
    levels = np.ceil(heights / heights.max() * (len(BARS) - 1)).astype(int)
    return "".join(BARS[level] if height else " " for level, height in zip(levels, heights, strict=True))


def show_question(question: AskedQuestion, console: Console) -> None:
    """Print a question and its stored answers."""
    console.print(Text(f"question {question.index}: {len(question.answers)} stored answers", style="bold"))
    console.print(Text(question.text), soft_wrap=True)
    if question.gold is not None:
        console.print(Text(f"right answer: {question.gold}"), soft_wrap=True)
    for answer in question.answers:
        console.print(Text(f"\n{answer.label}", style="bold"), soft_wrap=True)
        console.print(Text(answer.text), soft_wrap=True)
