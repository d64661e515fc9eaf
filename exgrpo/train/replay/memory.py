"""The experience buffer E, its success counts and the retired set S."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from exgrpo.train.common.errors import ConfigError, shown
from exgrpo.train.common.functions import Needs
from exgrpo.train.common.records import Mask
from exgrpo.train.common.step_batch import SCORES, Doubles, Floats, Ints, StepBatch
from exgrpo.train.common.success import is_success
from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.replay import rules
from exgrpo.train.replay.candidates import Candidates
from exgrpo.train.replay.groups import (
    Evidence,
    count_successes,
    deviation_counts,
    drift_and_headroom,
    group_advantages,
    in_group,
    success_counts,
)
from exgrpo.train.replay.table import NONE, Table, packed, unpacked

NEVER = -1
"""In the place of a step or a count: the question was not asked yet."""
OF_QUESTIONS = ("count", "asked", "times", "shown", "earlier")
"""Arrays with a number for each question."""
GAIN = 0.5
"""Change of the share of a stored answer that is given, per unit by which a group's pass rate lies below 1/2."""


class ExperienceMemory:
    """Stored trajectories by question, each question's success count, and the questions that are retired.

    Invariants, after every operation:
        a question has a success count, in [1, K-1], if and only if it has stored trajectories;
        a retired question has neither;
        the stored trajectories of a question come oldest first, and are distinct if `admit` wants them to be.

    What is stored and what is forgotten, the options say by their functions `admit` and `expire`. A question's count is
    that of its latest group, k = K m / F with m successes of F rows that count: not rounded, and kept inside [1, K-1].
    Where rewards are continuous (bucket_by "reward_deviation", section 5.3 of the paper) counts are those of
    `deviation_counts`. Either way a question is solved when all rows that count, at least two, have a reward of at
    least `success`.

    Args:
        questions: number of questions; they are known by index 0..questions-1.
        options: K, what a success is, and the options.

    Attributes:
        count: [questions] success count; 0 where nothing is stored.
        retired: [questions] True if it has left for good.
        asked: [questions] step in which it was asked last, or `NEVER`.
        times: [questions] how often it was asked.
        shown: [questions] success count by its latest group, in [0, K], whether or not anything is stored; or `NEVER`.
        earlier: [questions] the same by the group before; or `NEVER`.
        given: [questions] share of a stored answer that would bring the pass rate nearer to 1/2, as in `PlannedGroup`:
            after its latest group it has grown if that failed, and fallen, below 0 to shares of failures, if it passed.
        table: what is stored.
        admits_by_scores: True if `admit` reads the scores of fresh answers.
    """

    def __init__(self, questions: int, options: MethodOptions) -> None:
        experience = options.experience
        self.options = options
        self.samples = options.samples
        self.count: Doubles = np.zeros(questions)
        self.retired: npt.NDArray[np.bool_] = np.zeros(questions, dtype=bool)
        self.asked: Ints = np.full(questions, NEVER, np.int64)
        self.times: Ints = np.zeros(questions, np.int64)
        self.shown: Doubles = np.full(questions, float(NEVER))
        self.earlier = self.shown.copy()
        self.given: Doubles = np.zeros(questions)
        self.table = Table(questions, experience.folder)
        self._counts = deviation_counts if experience.bucket_by == "reward_deviation" else success_counts
        self._admit = rules.find("admit", experience.admit)
        self._distinct = Needs.of(self._admit).distinct
        self.admits_by_scores = Needs.of(self._admit).scores
        self._expire = [rules.find("expire", name) for name in experience.forgets if experience.stores]

    def __len__(self) -> int:
        """|E|: number of questions with stored trajectories."""
        return int(np.count_nonzero(self.count))

    def bucket_sizes(self) -> Ints:
        """[K+1] number of buffered questions by success count, rounded half up for people to read.

        Entries 0 and K are always 0.
        """
        sizes = np.bincount((self.count + 0.5).astype(np.int64), minlength=self.samples + 1)
        sizes[0] = 0
        return sizes

    def stored(self, now: int, solved: Ints | None = None) -> Candidates:
        """Return all stored trajectories, in the order of `Table.rows`, for a step."""
        table = self.table

        def read(name: str) -> npt.NDArray:
            return self.count[table.column("question")] if name == "count" else table.column(name)

        return Candidates(now, read, solved)

    def buffered(self, now: int) -> Candidates:
        """Return the questions with stored trajectories, in the order of their indices, for a step."""
        questions = np.flatnonzero(self.count)
        newest = self.table.newest(questions)
        own = {"question": questions, "count": self.count[questions]}
        return Candidates(now, lambda name: own[name] if name in own else self.table.values(name, newest))

    def prompts(self, now: int) -> Candidates:
        """Return the questions that were asked already and have not left, for a step."""
        questions = np.flatnonzero((self.asked != NEVER) & ~self.retired)
        return Candidates.of(
            now,
            question=questions,
            count=self.shown[questions],
            step=self.asked[questions],
            reward=self.shown[questions] / self.samples,
            replays=self.times[questions] - 1,
        )

    def admitted(self, batch: StepBatch) -> Mask:
        """Return a mask [N] of the rows to store: of those that `admit` chooses the unaided ones with tokens."""
        chosen = self._admit(batch if self.admits_by_scores else batch.without(*SCORES), self.options)
        return chosen & batch.unaided & (batch.length > 0) & ~self.retired[batch.question][batch.group]

    def update(self, batch: StepBatch, step: int, admitted: Mask) -> None:
        """Take in the graded groups of one training step, store the rows that are admitted [N], and forget by `expire`.

        Questions leave before the delayed start too. Groups of stored answers alone show nothing, and those with a
        prefix only what to give next.
        """
        self._steer(batch, step)
        unaided = np.unique(batch.group[batch.unaided])
        admitted, batch = admitted[batch.rows_of(unaided)], batch.take_groups(unaided)
        evidence, question = self.evidence(batch), batch.question
        counts = self._counts(evidence, self.samples)
        for of_group, count in zip(question.tolist(), counts.tolist(), strict=True):  # one may be there twice
            self.earlier[of_group], self.shown[of_group] = self.shown[of_group], count
        self._store(batch, evidence, admitted)
        held = self.table.held[question] > 0
        self.count[question[held]] = np.clip(counts[held], 1, self.samples - 1)
        self._forget(step + 1, question[evidence.solved])

    def _steer(self, batch: StepBatch, step: int) -> None:
        """Note which questions were asked, and what to give them next."""
        asked = np.unique(batch.group[batch.fresh])
        question = batch.question[asked]
        self.asked[question] = step
        np.add.at(self.times, question, 1)
        rate = batch.mean(is_success(batch.reward, self.options.success), batch.fresh)
        given = batch.mean(batch.column("given"), batch.fresh)
        self.given[question] = np.clip(given + GAIN * (0.5 - rate), -1, 1)[asked]

    def evidence(self, batch: StepBatch) -> Evidence:
        """Return what groups show about the current policy."""
        return count_successes(batch, self.options.success, count_replayed=self.options.experience.count_replayed)

    def _store(self, batch: StepBatch, evidence: Evidence, admitted: Mask) -> None:
        table, most = self.table, self.options.experience.max_per_question
        group, stored = batch.group[admitted], batch.take(admitted)
        if np.isnan(stored.old_log_prob).any():
            raise ValueError("old_log_prob: NaN of an answer that is to be stored")
        advantage = group_advantages(batch.net_reward, batch.group, in_group(batch), self.options.objective)[admitted]
        added = table.add(
            stored,
            advantage=advantage,
            successes=evidence.successes[group],
            answers=evidence.rows[group],
            **drift_and_headroom(stored, stored.old_log_prob, advantage),
        )
        if self._distinct:
            for row in added.tolist():
                # Of two equal answers the newer log-probs stay: their policy is nearer to the current one.
                of_question = table.rows_of_question(table.value("question", row))
                table.replace(self._same([at for at in of_question if at < row], row), row)
        if most is not None:
            for question in np.unique(batch.question[group]).tolist():
                table.remove(table.rows_of_question(question)[:-most])

    def rescored(self, batch: StepBatch, log_prob: Floats) -> None:
        """Renew `drift` and `headroom` of the replayed rows of a batch that are still stored.

        Args:
            batch: replayed rows have a `number`.
            log_prob: [T] under a later policy, at the temperature and over the sets of tokens of `old_log_prob`.
        """
        rows = self.table.numbered(batch.column("number"))
        there = np.flatnonzero(rows != NONE)
        rows, log_prob, batch = rows[there], log_prob[batch.places(there)], batch.take(there)
        self.table.put(rows, **drift_and_headroom(batch, log_prob, self.table.values("advantage", rows)))

    def _forget(self, now: int, solved: Ints) -> None:
        """Apply the functions of `expire`, one after the other, before the step `now` is planned."""
        for expire in self._expire:
            rows, leaving = expire(self.stored(now, solved), self.options)
            if rows is not None:
                gone = self.table.rows()[rows]
                questions = np.unique(self.table.values("question", gone))
                self.table.remove(gone)
                self.count[questions[self.table.held[questions] == 0]] = 0
            if leaving is not None:
                self._retire(leaving)
        self.table.tidy()

    def _retire(self, questions: Ints) -> None:
        if len(questions) and not 0 <= questions.min() <= questions.max() < len(self.retired):
            raise ConfigError(
                f"experience.expire: of the questions {shown(questions.tolist())} that leave, some are none of the "
                f"{len(self.retired)} questions, which are 0 to {len(self.retired) - 1}"
            )
        for question in questions.tolist():
            self.table.remove(self.table.rows_of_question(question))
        self.retired[questions] = True
        self.count[questions] = 0

    def fill(self, answers: StepBatch, count: Mapping[int, float]) -> None:
        """Begin with answers from elsewhere, whatever would store them.

        Args:
            answers: [N] distinct ones, oldest first, each a group of its own; their questions are not retired.
            count: success count in [1, K-1] of each of their questions.
        """
        self.table.fill(answers)
        self.count[:] = 0
        for question, of_question in count.items():
            self.count[question] = of_question

    def arrays(self) -> dict[str, npt.NDArray]:
        """Return the state with all stored answers, for `restore`."""
        of_questions = {name: getattr(self, name).copy() for name in OF_QUESTIONS}
        of_questions["given"] = self.given.copy()
        return {**of_questions, "retired": self.retired.astype(np.uint8), **packed(self.table.stored())}

    def restore(self, arrays: Mapping[str, npt.NDArray]) -> None:
        """Take over the state of another memory of the same questions: its `arrays`."""
        for name in OF_QUESTIONS:
            setattr(self, name, arrays[name].copy())
        self.given = arrays.get("given", np.zeros_like(self.given)).copy()  # files of before lack it
        self.retired = arrays["retired"].astype(bool)
        self.table.fill(unpacked(arrays))

    def _same(self, rows: Sequence[int], newer: int) -> list[int]:
        """Return those of some rows to a question that are equal to a newer one."""
        table, key = self.table, self.table.value("key", newer) if self._distinct == "key" else 0
        at, response = np.array(rows, np.int64), table.response(newer).tobytes()
        # Nearly all differ in length, which costs a tenth of comparing contents to find out; of short ones bytes are
        # compared in a tenth of the time that arrays take.
        same_length = table.values("length", at) == table.value("length", newer)
        by_key = (table.values("key", at) == key) & (key != 0)
        return [
            row
            for row, sure, perhaps in zip(rows, by_key.tolist(), same_length.tolist(), strict=True)
            if sure or (perhaps and table.response(row).tobytes() == response)
        ]
