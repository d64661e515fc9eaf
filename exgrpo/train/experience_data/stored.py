"""What is stored, as columns and as texts: the same for the checkpoint of a run and for a file of traces."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from exgrpo.train.records import Behaviour

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


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

    def fullest(self, most: int) -> list[int]:
        """The questions with most trajectories, at most so many; of equal ones the first."""
        questions, counts = np.unique(self.question, return_counts=True)
        return questions[np.argsort(-counts, kind="stable")[:most]].tolist()


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

    def questions(self, indices: Sequence[int]) -> list[AskedQuestion]:
        """Some questions with their answers as texts.

        Raises:
            DataError: there is no such question.
        """


def different(question: Ints, key: Ints) -> Ints:
    """[Q] how many different keys each question has that has one; 0 is no key."""
    keyed = np.unique(np.stack([question, key])[:, key != 0], axis=1)
    return np.unique(keyed[0], return_counts=True)[1]
