"""Questions in, graded answers out: generation and grading, spread over all ranks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from exgrpo.train.common.distributed import World, agree, fail_together
from exgrpo.train.common.errors import RolloutError
from exgrpo.train.common.records import Counts, EngineCounts, TokenIds
from exgrpo.train.common.seeds import derive_seed
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.data.questions import Question
from exgrpo.train.reward.contract import TURNS
from exgrpo.train.reward.pool import Grader, Grading
from exgrpo.train.rollout.engine import Finished, Request, RolloutEngine, Sampling
from exgrpo.train.rollout.stops import Stops, text_of, turns_of
from exgrpo.train.rollout.turns.conversations import Conversations


@dataclass(frozen=True, eq=False)
class Produced:
    """A rank's own answers, all generated and perhaps not yet all graded.

    Attributes:
        questions: all that are asked, on all ranks.
        counts: of the answers to each of them.
        positions: of its own questions among all.
        answers: (answer, text) in the order in which they were finished; empty on ranks that only help an engine.
        grading: knows their rewards, in the same order.
        seconds: in the engine.
        engine: what the engine counted.
        broken: answers that ended because the environment failed; None: there is no environment.
        problem: why the engine could not give all of them; None where it could.
    """

    questions: Sequence[Question]
    counts: Sequence[int]
    positions: list[int]
    answers: list[tuple[Finished, str]]
    grading: Grading
    seconds: float
    engine: EngineCounts
    broken: int | None
    problem: RolloutError | None


class Answerer:
    """Generates and grades; answers are graded while others are generated.

    Args:
        engine: this rank's rollout engine; it sleeps except while it generates.
        grader: this rank's grader.
        decode: turns token ids into text; the inverse of the tokenizer, special tokens kept.
        world: the ranks.
        conversations: answers of several turns; None: the policy writes alone.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        grader: Grader,
        decode: Callable[[TokenIds], str],
        world: World,
        conversations: Conversations | None = None,
    ) -> None:
        self.engine = engine
        self.grader = grader
        self.decode = decode
        self.world = world
        self.conversations = conversations
        self.tokens = 0
        """Response tokens generated so far, over all ranks."""
        self._known: set[tuple[str, str]] = set()
        self._untold: list[str] = []

    def answer(self, questions: Sequence[Question], counts: Sequence[int], sampling: Sampling, seed: int) -> StepBatch:
        """Sample counts[i] answers to questions[i] and grade them; see `join`."""
        return self.join(self.produce(questions, counts, sampling, seed))

    def produce(self, questions: Sequence[Question], counts: Sequence[int], sampling: Sampling, seed: int) -> Produced:
        """This rank's share of `answer`, without waiting for other ranks or for the last grades."""
        ranks = self.engine.ranks
        share = self.world.split(list(zip(questions, counts, strict=True)), ranks)
        asked = [question for _, (question, _) in share]
        requests = [
            Request(
                prompt=question.prompt_ids,
                count=count,
                sampling=self._sampling(question, sampling),
                seed=derive_seed(seed, "question", question.index),
            )
            for _, (question, count) in share
        ]
        grading = self.grader.begin()
        generated = (
            self.conversations.generate(self.engine, requests, asked)
            if self.conversations
            else self.engine.generate(requests)
        )
        answers: list[tuple[Finished, str]] = []
        problem: RolloutError | None = None
        start = time.perf_counter()
        self.engine.wake()
        try:
            for answer in generated:
                if self.world.rank % ranks == 0:
                    question = asked[answer.request]
                    text = text_of(answer.rollout, self.decode, requests[answer.request].sampling.stop.strings)
                    turns = {TURNS: turns_of(answer.rollout, self.decode)} if self.conversations else {}
                    grading.add(text, question.gold, question.text, question.reward, {**question.columns, **turns})
                    answers.append((answer, text))
        except RolloutError as error:
            problem = error
        self.engine.sleep()
        seconds, broken = time.perf_counter() - start, None
        if self.conversations:
            broken, self.conversations.broken = self.conversations.broken, 0
        positions = [position for position, _ in share]
        engine = self.engine.counts()
        return Produced(questions, counts, positions, answers, grading, seconds, engine, broken, problem)

    def _sampling(self, question: Question, sampling: Sampling) -> Sampling:
        """With the stop strings of the question's source, if it has any of its own."""
        return sampling if question.stop is None else replace(sampling, stop=Stops(question.stop, self.decode))

    def join(self, produced: Produced) -> StepBatch:
        """The graded answers of all ranks, the same on every rank; all ranks call it together.

        Returns:
            a group for each question that was asked, with its answers in the order of samples. Of the columns, those
            are filled that are known without a policy, and `counts`.

        Raises:
            RolloutError: on every rank, where the engine of one failed.
            RewardError: on every rank, where the reward of an answer is no number.
        """
        fail_together(self.world, produced.problem)
        start = time.perf_counter()
        grades = agree(self.world, produced.grading.finish)
        seconds = time.perf_counter() - start
        counts = Counts(
            answers=len(produced.answers),
            timed_out=grades.timed_out,
            failed=grades.failed,
            generate_seconds=produced.seconds,
            grade_seconds=seconds,
            engine=produced.engine,
            broken=produced.broken,
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
        batch = StepBatch.of_rollouts(
            [question.index for question in produced.questions], produced.counts, [row[0] for row in rows]
        )
        batch.fill(
            prompt=[question.prompt_ids for question in produced.questions],
            **{name: [row[i] for row in rows] for i, name in enumerate(("text", "reward", "key", "parts"), 1)},
            counts=counts,
        )
        self.tokens += int(np.count_nonzero(batch.own))
        self._untold += [str(one) for one in counts.failures if one.kind not in self._known]
        self._known |= {one.kind for one in counts.failures}
        return batch

    def news(self) -> list[str]:
        """A sentence about each kind of failure of a reward that has not been told yet."""
        untold, self._untold = self._untold, []
        return untold
