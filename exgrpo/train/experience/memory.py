"""The experience buffer E, its success counts and the retired set S."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from exgrpo.train.experience.buckets import BUCKETS
from exgrpo.train.experience.difficulty import Evidence, count_successes
from exgrpo.train.experience.tables import look_up
from exgrpo.train.records import Group, TokenIds, Trajectory


@dataclass(frozen=True)
class MemoryRules:
    """What is stored, for how long, and when a question leaves.

    Attributes:
        success: a reward of at least this is a success.
        count_replayed: see `count_successes`.
        max_per_question: keep only the latest so many trajectories of a question.
        max_age: no step replays a trajectory that was written more than so many steps before it.
        retire: solved questions leave for good. Without it they stay: nothing is ever retired, and a group that
            solves its question is one more group with successes, of the highest count.
        bucket_by: one of `BUCKETS`.
    """

    success: float = 1.0
    count_replayed: bool = False
    max_per_question: int | None = None
    max_age: int | None = None
    retire: bool = True
    bucket_by: str = "success_count"


class Stored(NamedTuple):
    """A trajectory in the buffer."""

    trajectory: Trajectory
    replays: int = 0
    """How often its response has been replayed."""


class ExperienceMemory:
    """Successful trajectories by question, each question's success count, and the questions that are retired.

    Invariants, after every operation:
        a question has a success count, in [1, K-1], if and only if it has stored trajectories;
        a retired question has neither;
        the stored trajectories of a question are distinct successes of that question, oldest first.

    A success has a reward of at least `success`, and a question's count is that of its latest group, k = K m / F with
    m successes of F rows that count: not rounded, and kept inside [1, K-1]. Where rewards are continuous (bucket_by
    "reward_deviation", section 5.3 of the paper) what is stored are the rows that are better than their group's mean,
    so that their advantage was positive, and counts are those of `deviation_counts`. Either way a question is
    solved when all rows that count, at least two, have a reward of at least `success`.

    Args:
        questions: number of questions; they are known by index 0..questions-1.
        samples: K, answers per question.
        rules: what is stored, and for how long.
    """

    def __init__(self, questions: int, samples: int, rules: MemoryRules = MemoryRules()) -> None:
        self.samples = samples
        self.rules = rules
        self.count: npt.NDArray[np.float64] = np.zeros(questions)
        self.retired: npt.NDArray[np.bool_] = np.zeros(questions, dtype=bool)
        self._buckets = look_up(BUCKETS, rules.bucket_by, "bucket_by")
        self._stored: dict[int, tuple[Stored, ...]] = {}

    def __len__(self) -> int:
        """|E|: number of questions with stored trajectories."""
        return len(self._stored)

    def trajectories(self, question: int) -> tuple[Trajectory, ...]:
        """The stored successes of a question, oldest first; empty where there are none."""
        return tuple(one.trajectory for one in self._stored.get(question, ()))

    def all_trajectories(self) -> list[Trajectory]:
        """Everything that is stored, by question; of a question oldest first."""
        return [one.trajectory for one in self._all()]

    def all_replays(self) -> npt.NDArray[np.int64]:
        """[N] how often each of `all_trajectories` has been replayed."""
        return np.array([one.replays for one in self._all()], dtype=np.int64)

    def _all(self) -> Iterator[Stored]:
        return (one for question in sorted(self._stored) for one in self._stored[question])

    def restore(
        self,
        count: npt.NDArray[np.float64],
        retired: npt.NDArray[np.bool_],
        trajectories: Sequence[Trajectory],
        replays: npt.NDArray[np.int64],
    ) -> None:
        """Take over the state of another memory of the same questions: its fields, all trajectories and replays."""
        self.count, self.retired = count.copy(), retired.copy()
        self._stored = {}
        for trajectory, times in zip(trajectories, replays.tolist(), strict=True):
            of_question = self._stored.get(trajectory.question, ())
            self._stored[trajectory.question] = (*of_question, Stored(trajectory, times))

    def count_replay(self, question: int, index: int) -> int:
        """Note that the question's trajectory at this index is replayed; returns how often it has been by now."""
        stored = list(self._stored[question])
        stored[index] = Stored(stored[index].trajectory, stored[index].replays + 1)
        self._stored[question] = tuple(stored)
        return stored[index].replays

    @property
    def trajectory_count(self) -> int:
        """Number of stored trajectories."""
        return sum(len(stored) for stored in self._stored.values())

    def bucket_sizes(self) -> npt.NDArray[np.int64]:
        """[K+1] number of buffered questions by success count, rounded half up for people to read.

        Entries 0 and K are always 0.
        """
        sizes = np.bincount((self.count + 0.5).astype(np.int64), minlength=self.samples + 1)
        sizes[0] = 0
        return sizes

    def update(self, groups: Sequence[Group], step: int, *, collect: bool) -> None:
        """Take in the graded groups of one training step, and forget what is too old for the next one.

        Solved questions retire before the delayed start too; successes are stored only where `collect` (after it).
        """
        shown = [self.evidence(group) for group in groups]
        counts = np.clip(self._buckets.counts(shown, self.samples), 1, self.samples - 1)
        for group, evidence, count in zip(groups, shown, counts, strict=True):
            if self.rules.retire and evidence.solved:
                self._retire(group.question)
            elif not self.retired[group.question]:
                if collect:
                    self._store(group)
                if group.question in self._stored:
                    self.count[group.question] = count
        if self.rules.max_age is not None:
            self._forget(oldest=step + 1 - self.rules.max_age)

    def evidence(self, group: Group) -> Evidence:
        """What a group shows about the current policy."""
        return count_successes(group, self.rules.success, count_replayed=self.rules.count_replayed)

    def _retire(self, question: int) -> None:
        self.retired[question] = True
        self.count[question] = 0
        self._stored.pop(question, None)

    def _store(self, group: Group) -> None:
        kept = self._stored.get(group.question, ())
        for row in self._buckets.admitted(group, self.rules.success):
            if len(row.response):  # without tokens there is nothing to replay
                # Of two equal responses the newer log-probs stay: their policy is nearer to the current one.
                same = [_same(old.trajectory.response, row.response) for old in kept]
                replays = sum(compress((old.replays for old in kept), same))
                kept = (*(old for old, is_same in zip(kept, same, strict=True) if not is_same), Stored(row, replays))
        if self.rules.max_per_question is not None:
            kept = kept[-self.rules.max_per_question :]
        if kept:
            self._stored[group.question] = kept

    def _forget(self, oldest: int) -> None:
        for question, stored in list(self._stored.items()):
            young = tuple(one for one in stored if one.trajectory.step >= oldest)
            if not young:
                del self._stored[question]
                self.count[question] = 0
            elif len(young) < len(stored):
                self._stored[question] = young


def _same(a: TokenIds, b: TokenIds) -> bool:
    # Nearly all pairs differ in length, which costs a tenth of comparing contents to find out.
    return len(a) == len(b) and np.array_equal(a, b)
