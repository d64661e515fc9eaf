"""The experience buffer E, its buckets and the retired set S."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from exgrpo.train.records import Group, Trajectory


def estimate_successes(group: Group, samples: int, *, count_replayed: bool = False) -> int:
    """The success count k in 0..K that a group shows for its question under the current policy.

    The replayed row is no evidence of the current policy: k is the count m over the F fresh rows rescaled to
    K = `samples` and rounded half up. m of K stays m. `count_replayed` counts it instead (m + 1 of F + 1).
    k is 0 exactly when nothing counted succeeded and K exactly when everything did (K >= 2).
    """
    rows: Sequence[Trajectory] = group.rows if count_replayed else group.fresh
    right = sum(row.reward >= 1.0 for row in rows)
    if right in (0, len(rows)):
        return samples if right else 0
    rescaled = (2 * right * samples + len(rows)) // (2 * len(rows))
    return min(max(rescaled, 1), samples - 1)


class ExperienceMemory:
    """Successful trajectories by question, each question's bucket, and the questions that are retired.

    Invariants, after every operation:
        a question has a bucket (1..K-1) if and only if it has stored trajectories;
        a retired question has neither;
        the stored trajectories of a question are distinct successes of that question, oldest first.

    Args:
        questions: number of questions; they are known by index 0..questions-1.
        samples: K, answers per question.
        count_replayed: see `estimate_successes`.
        max_per_question: keep only the latest so many trajectories of a question.
        max_age: forget trajectories written more than so many steps ago.
    """

    def __init__(
        self,
        questions: int,
        samples: int,
        *,
        count_replayed: bool = False,
        max_per_question: int | None = None,
        max_age: int | None = None,
    ) -> None:
        self.samples = samples
        self.count_replayed = count_replayed
        self.max_per_question = max_per_question
        self.max_age = max_age
        self.bucket: npt.NDArray[np.int16] = np.zeros(questions, dtype=np.int16)
        self.retired: npt.NDArray[np.bool_] = np.zeros(questions, dtype=bool)
        self._stored: dict[int, tuple[Trajectory, ...]] = {}

    def __len__(self) -> int:
        """|E|: number of questions with stored trajectories."""
        return len(self._stored)

    def trajectories(self, question: int) -> tuple[Trajectory, ...]:
        """The stored successes of a question, oldest first; empty where there are none."""
        return self._stored.get(question, ())

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

        Solved questions retire in any case; successes are stored only where `collect` (after the delayed start).
        """
        for group in groups:
            successes = estimate_successes(group, self.samples, count_replayed=self.count_replayed)
            if successes == self.samples:
                self._retire(group.question)
            elif not self.retired[group.question]:
                if collect:
                    self._store(group)
                if group.question in self._stored:
                    self.bucket[group.question] = max(successes, 1)
        if self.max_age is not None:
            self._forget(oldest=step - self.max_age)

    def _retire(self, question: int) -> None:
        self.retired[question] = True
        self.bucket[question] = 0
        self._stored.pop(question, None)

    def _store(self, group: Group) -> None:
        kept = self.trajectories(group.question)
        for row in group.fresh:
            if row.reward < 1.0:
                continue
            # Of two equal responses the newer log-probs stay: their policy is nearer to the current one.
            kept = (*(old for old in kept if not np.array_equal(old.response, row.response)), row)
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
