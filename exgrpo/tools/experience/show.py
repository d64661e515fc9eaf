"""What a run or a file of traces holds, as columns and as texts, and how a terminal shows it."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from exgrpo.train.common.records import Behaviour

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
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


@dataclass(frozen=True, eq=False)
class Overview:
    """N stored trajectories as columns.

    Attributes:
        title: what they are.
        asked: number of questions that they could belong to; None: not known.
        retired: number of questions that have left for good; None: not known.
        question: [N] index of the question of each.
        numbers: [N] by name, what is known of each; NaN where it is not known of one.
        counts: success count of each question with a trajectory; empty: not known.
        behaviour: how many have their log-probs from whom.
        solutions: for each question with keys of solutions, how many different ones it has.
    """

    title: str
    asked: int | None
    retired: int | None
    question: Ints
    numbers: dict[str, Floats]
    counts: Floats
    behaviour: dict[str, int]
    solutions: Ints

    @property
    def distributions(self) -> dict[str, Floats]:
        """What there is to count, by name: values of trajectories and of questions, without those not known."""
        per_question = np.unique(self.question, return_counts=True)[1].astype(np.float64)
        every = {
            **self.numbers,
            "success count": self.counts,
            "answers": per_question,
            "solutions": self.solutions.astype(np.float64),
        }
        known = {name: values[np.isfinite(values)] for name, values in every.items()}
        return {name: values for name, values in known.items() if len(values)}


@dataclass(frozen=True)
class StoredAnswer:
    """A stored answer, to be read.

    Attributes:
        text: what it says.
        reward: what the verifier gave; None: not known.
        step: in which it was written; None: not known.
        replays: how often it was replayed.
        log_prob: mean over its tokens, in nats; None: not known.
        finished: whether it ended by itself.
        behaviour: who computed its log-probs; None: not known.
    """

    text: str
    reward: float | None
    step: int | None
    replays: int
    log_prob: float | None
    finished: bool
    behaviour: Behaviour | None

    @property
    def label(self) -> str:
        """What is known of it, in one line."""
        parts = [
            "" if self.reward is None else f"reward {self.reward:g}",
            "" if self.step is None else f"step {self.step}",
            f"replayed {self.replays} times",
            "" if self.log_prob is None else f"mean log-prob {self.log_prob:.3f}",
            "" if self.behaviour is None else f"by {self.behaviour}",
            "" if self.finished else "cut at the length limit",
        ]
        return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class AskedQuestion:
    """A question with its right answer, and what is stored for it, oldest first."""

    index: int
    text: str
    gold: str | None
    answers: tuple[StoredAnswer, ...]


class Experience(Protocol):
    """What can be shown."""

    def overview(self) -> Overview:
        """All trajectories as columns."""

    def question(self, index: int) -> AskedQuestion:
        """A question with its answers as texts.

        Raises:
            DataError: there is no such question.
        """


def different(question: Ints, key: Ints) -> Ints:
    """[Q] how many different keys each question has that has one; 0 is no key."""
    keyed = np.unique(np.stack([question, key])[:, key != 0], axis=1)
    return np.unique(keyed[0], return_counts=True)[1]


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


def bars(values: Floats) -> str:
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
