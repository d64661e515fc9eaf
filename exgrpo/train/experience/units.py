"""What can be drawn or forgotten, as columns: questions, prompts or stored trajectories."""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from exgrpo.train.errors import ConfigError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Units:
    """N units, one column for each thing that is known of them, all [N].

    Of a stored trajectory everything is known. Of a question that has some, what is known is that of its newest one; of
    a prompt, only its question, its count and when it was asked last.

    Args:
        now: the step for which something is decided.
        read: gives the column of a name; it is asked once, and only for what is looked at.
        solved: [S] questions that all answers of the latest step solve.
    """

    def __init__(self, now: int, read: Callable[[str], npt.NDArray], solved: Ints | None = None) -> None:
        self.now = now
        self.solved = np.empty(0, np.int64) if solved is None else solved
        self._read = read

    @classmethod
    def of(cls, now: int, solved: Ints | None = None, **columns: npt.NDArray) -> "Units":
        """Units with these columns.

        Raises, when another one is looked at:
            ConfigError: it is not known of them.
        """

        def read(name: str) -> npt.NDArray:
            if name not in columns:
                raise ConfigError(
                    f"experience.prioritise looks at {name!r}, which is not known of what is drawn here: there are "
                    f"{', '.join(columns)}; take another function"
                )
            return columns[name]

        return cls(now, read, solved)

    def __len__(self) -> int:
        return len(self.question)

    def take(self, places: npt.NDArray | slice) -> "Units":
        """Some of them, by number [M], by a mask [N] or by a slice."""
        return Units(self.now, lambda name: self._read(name)[places], self.solved)

    @cached_property
    def question(self) -> Ints:
        """Index of the question."""
        return self._read("question")

    @cached_property
    def count(self) -> Floats:
        """The question's success count by its latest group, k = K m / F: in [1, K-1], of prompts in [0, K]."""
        return self._read("count")

    @cached_property
    def step(self) -> Ints:
        """Training step in which the trajectory was written, or the prompt asked."""
        return self._read("step")

    @property
    def age(self) -> Ints:
        """Steps since then."""
        return self.now - self.step

    @cached_property
    def reward(self) -> Floats:
        """What the verifier gave."""
        return self._read("reward")

    @cached_property
    def advantage(self) -> Floats:
        """Of the trajectory in the group that it was written in."""
        return self._read("advantage")

    @cached_property
    def accuracy(self) -> Floats:
        """Fraction of successes m / F of that group; 0 where it is unknown."""
        return self._read("successes") / np.maximum(self._read("answers"), 1)

    @cached_property
    def replays(self) -> Ints:
        """How often it has been replayed, or the prompt answered again."""
        return self._read("replays")

    @cached_property
    def length(self) -> Ints:
        """Its response tokens."""
        return self._read("length")

    @cached_property
    def key(self) -> Ints:
        """Of its solution; 0: none."""
        return self._read("key")


class Expired(NamedTuple):
    """What is let go: what a function `expire` gives for all stored trajectories.

    Attributes:
        rows: [N] bool, the stored trajectories that are forgotten; None: no one.
        questions: [S] those that leave for good, with all that is stored of them; None: no one.
    """

    rows: npt.NDArray[np.bool_] | None = None
    questions: Ints | None = None
