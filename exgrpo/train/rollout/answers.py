"""Generate and grade answers to questions, spread over all ranks."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from exgrpo.train.common.distributed import World, agree, fail_together
from exgrpo.train.common.errors import RolloutError
from exgrpo.train.common.records import Counts, Rollout, TokenIds
from exgrpo.train.common.seeds import derive_seed
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.data.questions import Question
from exgrpo.train.reward.contract import TURNS
from exgrpo.train.reward.pool import Grader, Grading
from exgrpo.train.rollout.engine import Finished, Request, RolloutEngine, Sampling, generate
from exgrpo.train.rollout.stops import Stops, text_of, turns_of
from exgrpo.train.rollout.turns.conversations import Conversations


@dataclass(frozen=True, eq=False)
class Produced:
    """Answers that one rank has generated; grading may still be under way.

    Attributes:
        questions: questions of all ranks.
        counts: number of answers to each of these questions.
        positions: indices in `questions` of this rank's share.
        answers: (answer, text) in the order they finished; empty on ranks that only hold a part of an engine.
        grading: returns the rewards, in the same order.
        spent: counts and seconds of generating them.
        problem: the engine's error if answers are missing.
    """

    questions: Sequence[Question]
    counts: Sequence[int]
    positions: list[int]
    answers: list[tuple[Finished, str]]
    grading: Grading
    spent: Counts
    problem: RolloutError | None


@dataclass(eq=False)
class RolloutWorker:
    """Generates and grades answers; answers are graded while others are being generated.

    Attributes:
        engine: this rank's rollout engine; asleep except while generating.
        decode: decodes token ids to text, special tokens included.
        conversations: answers of several turns; None: the policy writes alone.
        tokens: response tokens generated so far, over all ranks.
    """

    engine: RolloutEngine
    grader: Grader
    decode: Callable[[TokenIds], str]
    world: World
    conversations: Conversations | None = None
    tokens: int = field(default=0, init=False)
    _reported: set[tuple[str, str]] = field(default_factory=set, init=False)
    _unreported: list[str] = field(default_factory=list, init=False)
    _seconds: float = field(default=0.0, init=False)

    def answer(self, questions: Sequence[Question], counts: Sequence[int], sampling: Sampling, seed: int) -> StepBatch:
        """Sample counts[i] answers to questions[i] and grade them; returns and raises as `join`."""
        return self.join(self.produce(questions, counts, sampling, seed))

    def produce(
        self,
        questions: Sequence[Question],
        counts: Sequence[int],
        sampling: Sampling,
        seed: int,
        written: Sequence[Sequence[Rollout]] | None = None,
        prefixes: Sequence[Sequence[int]] | None = None,
    ) -> Produced:
        """Generate this rank's share of the answers, without waiting for other ranks or for the last grades.

        Of answers that are `written` already, to the first questions that have any, all are only graded. Those to a
        question with a prefix begin with its tokens.
        """
        ranks = self.engine.ranks
        prefixes = [()] * len(questions) if prefixes is None else prefixes
        share = self.world.split(list(zip(questions, counts, prefixes, strict=True)), ranks)
        asked = [question for _, (question, *_) in share]
        requests = [
            self.request(question, count, sampling, derive_seed(seed, "question", question.index), prefix)
            for _, (question, count, prefix) in share
        ]
        grading = self.grader.begin()
        if written is not None:
            mine = [written[position] if position < len(written) else [] for position, _ in share]
            generated = iter([Finished(i, sample, one) for i, of in enumerate(mine) for sample, one in enumerate(of)])
        elif self.conversations:
            generated = self.conversations.generate(self.engine, requests, asked)
        else:
            generated = generate(self.engine, requests)
        answers: list[tuple[Finished, str]] = []
        problem: RolloutError | None = None
        try:
            for answer in generated if written is not None else self.awake(generated):
                if self.world.rank % ranks == 0:
                    question = asked[answer.request]
                    text = text_of(answer.rollout, self.decode, requests[answer.request].sampling.stop.strings)
                    turns = {TURNS: turns_of(answer.rollout, self.decode)} if self.conversations else {}
                    grading.add(text, question.gold, question.text, question.reward, {**question.columns, **turns})
                    answers.append((answer, text))
        except RolloutError as error:
            problem = error
        (seconds, self._seconds), broken = (self._seconds, 0.0), None
        if self.conversations:
            broken, self.conversations.broken = self.conversations.broken, 0
        positions = [position for position, _ in share]
        spent = Counts(len(answers), 0, 0, seconds, 0.0, self.engine.counts(), broken)
        return Produced(questions, counts, positions, answers, grading, spent, problem)

    def request(
        self, question: Question, count: int, sampling: Sampling, seed: int, prefix: Sequence[int] = ()
    ) -> Request:
        """Return the request for answers to a question, with the stop strings of its source if that has its own."""
        if question.stop is not None:
            sampling = replace(sampling, stop=Stops(question.stop, self.decode))
        begun = Rollout(np.array(prefix, np.int32), False, response_mask=np.zeros(len(prefix), bool))
        return Request(question.prompt_ids, count, sampling, seed, begun=(begun,) * count if prefix else ())

    def awake(self, generated: Iterator[Finished]) -> Iterator[Finished]:
        """Yield what the engine generates, and put it to sleep again; the time counts in the next `Produced`."""
        start = time.perf_counter()
        self.engine.wake()
        try:
            yield from generated
        except RolloutError:
            self.engine.sleep()
            raise
        self.engine.sleep()
        self._seconds += time.perf_counter() - start

    def join(self, produced: Produced) -> StepBatch:
        """Gather the graded answers of all ranks; a collective call with the same result on every rank.

        Returns:
            one group per question, its answers in sampling order. Filled: the columns that need no pass of the
            policy, and `counts`.

        Raises:
            RolloutError: on every rank, if the engine of one failed.
            RewardError: on every rank, if a reward is not a number.
        """
        fail_together(self.world, produced.problem)
        start = time.perf_counter()
        grades = agree(self.world, produced.grading.finish)
        counts = replace(
            produced.spent,
            timed_out=grades.timed_out,
            failed=grades.failed,
            grade_seconds=time.perf_counter() - start,
            failures=grades.failures,
        )
        first_rows = np.cumsum([0, *produced.counts]).tolist()
        parts = grades.parts or ({},) * len(grades.reward)
        mine: list[tuple[int, tuple[Any, ...]]] = [
            (first_rows[produced.positions[one.request]] + one.sample, (one.rollout, text, *graded))
            for (one, text), *graded in zip(produced.answers, grades.reward, grades.key, parts, strict=True)
        ]
        counts = Counts.together(self.world.gather(counts))
        rows = self.world.join(mine)
        batch = StepBatch.from_rollouts(
            [question.index for question in produced.questions], produced.counts, [row[0] for row in rows]
        )
        batch.fill(
            prompt=[question.prompt_ids for question in produced.questions],
            **{name: [row[i] for row in rows] for i, name in enumerate(("text", "reward", "key", "parts"), 1)},
            counts=counts,
        )
        self.tokens += int(np.count_nonzero(batch.response_mask))
        self._unreported += [str(one) for one in counts.failures if one.kind not in self._reported]
        self._reported |= {one.kind for one in counts.failures}
        return batch

    def news(self) -> list[str]:
        """Return one sentence per kind of reward failure that was not reported before."""
        unreported, self._unreported = self._unreported, []
        return unreported
