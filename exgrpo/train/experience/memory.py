"""The experience buffer E, its buckets and the retired set S."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from exgrpo.train.experience.partition import EPSILON, deviation_buckets, estimate_successes
from exgrpo.train.records import Group, TokenIds, Trajectory


class ExperienceMemory:
    """Successful trajectories by question, each question's bucket, and the questions that are retired.

    Invariants, after every operation:
        a question has a bucket (1..K-1) if and only if it has stored trajectories;
        a retired question has neither;
        the stored trajectories of a question are distinct successes of that question, oldest first.

    A success has reward 1, its bucket is the question's latest success count. Where rewards are continuous
    (bucket_by "reward_deviation", section 5.3 of the paper) a success is a row that is better than its group's
    mean, so that its advantage was positive, and buckets are those of `deviation_buckets`. Either way a question is
    solved when all rows that count have reward 1.

    Args:
        questions: number of questions; they are known by index 0..questions-1.
        samples: K, answers per question.
        count_replayed: see `estimate_successes`.
        max_per_question: keep only the latest so many trajectories of a question.
        max_age: forget trajectories written more than so many steps ago.
        retire: solved questions leave for good. Without it they stay: nothing is ever retired, and a group that
            solves its question is one more group with successes, in the highest bucket.
        bucket_by: "success_count" or "reward_deviation".
    """

    def __init__(
        self,
        questions: int,
        samples: int,
        *,
        count_replayed: bool = False,
        max_per_question: int | None = None,
        max_age: int | None = None,
        retire: bool = True,
        bucket_by: str = "success_count",
    ) -> None:
        self.samples = samples
        self.count_replayed = count_replayed
        self.max_per_question = max_per_question
        self.max_age = max_age
        self.retire = retire
        self.bucket_by = bucket_by
        self.bucket: npt.NDArray[np.int16] = np.zeros(questions, dtype=np.int16)
        self.retired: npt.NDArray[np.bool_] = np.zeros(questions, dtype=bool)
        self._stored: dict[int, tuple[Trajectory, ...]] = {}

    def __len__(self) -> int:
        """|E|: number of questions with stored trajectories."""
        return len(self._stored)

    def trajectories(self, question: int) -> tuple[Trajectory, ...]:
        """The stored successes of a question, oldest first; empty where there are none."""
        return self._stored.get(question, ())

    def all_trajectories(self) -> list[Trajectory]:
        """Everything that is stored, by question; of a question oldest first."""
        return [trajectory for question in sorted(self._stored) for trajectory in self._stored[question]]

    def restore(
        self, bucket: npt.NDArray[np.int16], retired: npt.NDArray[np.bool_], trajectories: Sequence[Trajectory]
    ) -> None:
        """Take over the state of another memory of the same questions: its fields and `all_trajectories`."""
        self.bucket, self.retired = bucket.copy(), retired.copy()
        self._stored = {}
        for trajectory in trajectories:
            self._stored[trajectory.question] = (*self.trajectories(trajectory.question), trajectory)

    @property
    def trajectory_count(self) -> int:
        """Number of stored trajectories."""
        return sum(len(stored) for stored in self._stored.values())

    def bucket_sizes(self) -> npt.NDArray[np.int64]:
        """[K+1] number of buffered questions by success count; entries 0 and K are always 0."""
        sizes = np.bincount(self.bucket, minlength=self.samples + 1)
        sizes[0] = 0
        return sizes

    def update(self, groups: Sequence[Group], step: int, *, collect: bool) -> None:
        """Take in the graded groups of one training step.

        Solved questions retire before the delayed start too; successes are stored only where `collect` (after it).
        """
        successes = [estimate_successes(group, self.samples, count_replayed=self.count_replayed) for group in groups]
        for group, k, bucket in zip(groups, successes, self._buckets(groups, successes), strict=True):
            if self.retire and k == self.samples:
                self._retire(group.question)
            elif not self.retired[group.question]:
                if collect:
                    self._store(group)
                if group.question in self._stored:
                    self.bucket[group.question] = bucket
        if self.max_age is not None:
            self._forget(oldest=step - self.max_age)

    def _buckets(self, groups: Sequence[Group], successes: Sequence[int]) -> npt.NDArray[np.int64]:
        if self.bucket_by == "reward_deviation":
            return deviation_buckets(groups, self.samples, count_replayed=self.count_replayed)
        return np.clip(np.array(successes, dtype=np.int64), 1, self.samples - 1)

    def _retire(self, question: int) -> None:
        self.retired[question] = True
        self.bucket[question] = 0
        self._stored.pop(question, None)

    def _store(self, group: Group) -> None:
        kept = self.trajectories(group.question)
        least = 1.0
        if self.bucket_by == "reward_deviation":
            least = float(np.mean([row.reward for row in group.rows])) + EPSILON
        for row in group.fresh:
            if row.reward < least:
                continue
            # Of two equal responses the newer log-probs stay: their policy is nearer to the current one.
            kept = (*(old for old in kept if not _same(old.response, row.response)), row)
        if self.max_per_question is not None:
            kept = kept[-self.max_per_question :]
        if kept:
            self._stored[group.question] = kept

    def _forget(self, oldest: int) -> None:
        for question, stored in list(self._stored.items()):
            young = tuple(row for row in stored if row.step >= oldest)
            if not young:
                del self._stored[question]
                self.bucket[question] = 0
            elif len(young) < len(stored):
                self._stored[question] = young


def _same(a: TokenIds, b: TokenIds) -> bool:
    # Nearly all pairs differ in length, which costs a tenth of comparing contents to find out.
    return len(a) == len(b) and np.array_equal(a, b)
