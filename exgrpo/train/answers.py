"""Questions in, graded answers out: generation and grading, spread over all ranks."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from exgrpo.train.data.questions import Question
from exgrpo.train.distributed import World, agree, fail_together
from exgrpo.train.errors import RolloutError
from exgrpo.train.records import Rollout, TokenIds
from exgrpo.train.reward.contract import TURNS
from exgrpo.train.reward.names import reward_of
from exgrpo.train.reward.outcome import Failure, by_kind
from exgrpo.train.reward.pool import Grader, Grading
from exgrpo.train.rollout import EngineCounts, Finished, Request, RolloutEngine, Sampling, Stops, text_of, turns_of
from exgrpo.train.seeds import derive_seed
from exgrpo.train.turns.conversations import Conversations


@dataclass(frozen=True, eq=False)
class Answer:
    """A graded rollout.

    Attributes:
        rollout: the tokens.
        text: what is graded, before the EOS token or stop string.
        reward: what the verifier gave.
        key: of its solution, as in `Grades`; 0: it has none.
        parts: of the reward, as in `Grades`.
    """

    rollout: Rollout
    text: str
    reward: float
    key: int
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Answers:
    """The answers to each question, and what it took.

    Attributes:
        of_question: for each question its answers.
        timed_out: answers that were graded 0 because grading took too long, over all ranks.
        failed: answers graded 0 because the reward function failed.
        generate_seconds: time in the engine, the slowest rank's.
        grade_seconds: time in which the grader was still at work after the engine, the slowest rank's.
        engine: what the engines counted, over all ranks; time asleep is the longest.
        broken: answers that ended because the environment failed; None: there is no environment.
        failures: answers that timed out or failed, by kind.
    """

    of_question: list[list[Answer]]
    timed_out: int
    failed: int
    generate_seconds: float
    grade_seconds: float
    engine: EngineCounts
    broken: int | None = None
    failures: tuple[Failure, ...] = ()

    def and_further(self, other: "Answers") -> "Answers":
        """These, and those to further questions that were asked afterwards."""
        return Answers(
            of_question=[*self.of_question, *other.of_question],
            timed_out=self.timed_out + other.timed_out,
            failed=self.failed + other.failed,
            generate_seconds=self.generate_seconds + other.generate_seconds,
            grade_seconds=self.grade_seconds + other.grade_seconds,
            engine=EngineCounts(
                prompt_tokens=self.engine.prompt_tokens + other.engine.prompt_tokens,
                cached_tokens=self.engine.cached_tokens + other.engine.cached_tokens,
                asleep_seconds=self.engine.asleep_seconds + other.engine.asleep_seconds,
            ),
            broken=None if self.broken is None else self.broken + (other.broken or 0),
            failures=by_kind((*self.failures, *other.failures)),
        )

    @property
    def failed_fraction(self) -> float:
        """Of the answers, those that timed out or failed."""
        return (self.timed_out + self.failed) / max(sum(map(len, self.of_question)), 1)

    @property
    def rewards(self) -> np.ndarray:
        """All rewards, flat."""
        return np.array([answer.reward for answers in self.of_question for answer in answers])

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts, flat."""
        return [answer.rollout for answers in self.of_question for answer in answers]


@dataclass(frozen=True, eq=False)
class Produced:
    """A rank's own answers, all generated and perhaps not yet all graded.

    Attributes:
        positions: of its questions among all.
        answers: (answer, text) in the order in which they were finished; empty on ranks that only help an engine.
        grading: knows their rewards, in the same order.
        seconds: in the engine.
        engine: what the engine counted.
        broken: answers that ended because the environment failed; None: there is no environment.
        problem: why the engine could not give all of them; None where it could.
    """

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
        reward: name of the reward of all questions; None: each has that of its source.
        conversations: answers of several turns; None: the policy writes alone.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        grader: Grader,
        decode: Callable[[TokenIds], str],
        world: World,
        reward: str | None = None,
        conversations: Conversations | None = None,
    ) -> None:
        self.engine = engine
        self.grader = grader
        self.decode = decode
        self.world = world
        self.reward = reward
        self.conversations = conversations
        self.tokens = 0
        """Response tokens generated so far, over all ranks."""
        self._known: set[tuple[str, str]] = set()
        self._untold: list[str] = []

    def answer(self, questions: Sequence[Question], counts: Sequence[int], sampling: Sampling, seed: int) -> Answers:
        """Sample counts[i] answers to questions[i] and grade them; the result is the same on every rank."""
        return self.join(self.produce(questions, counts, sampling, seed))

    def produce(self, questions: Sequence[Question], counts: Sequence[int], sampling: Sampling, seed: int) -> Produced:
        """This rank's share of `answer`, without waiting for other ranks or for the last grades."""
        ranks = self.engine.ranks
        share = self.world.split(list(zip(questions, counts, strict=True)), ranks)
        asked = [question for _, (question, _) in share]
        requests = [
            Request(
                prompt=np.array(question.prompt, dtype=np.int32),
                count=count,
                sampling=self._sampling(question, sampling),
                seed=derive_seed(seed, "question", question.index),
            )
            for _, (question, count) in share
        ]
        grading = self.grader.begin()
        answers: list[tuple[Finished, str]] = []
        problem: RolloutError | None = None
        start = time.perf_counter()
        self.engine.wake()
        try:
            for answer in self._generate(requests, asked):
                if self.world.rank % ranks == 0:
                    question = asked[answer.request]
                    text = text_of(answer.rollout, self.decode, requests[answer.request].sampling.stop.strings)
                    reward = reward_of(question.reward, self.reward)
                    columns = {**question.columns, **self._told(answer.rollout)}
                    grading.add(text, question.gold, question.text, reward, columns)
                    answers.append((answer, text))
        except RolloutError as error:
            problem = error
        self.engine.sleep()
        seconds, broken = time.perf_counter() - start, None
        if self.conversations:
            broken, self.conversations.broken = self.conversations.broken, 0
        positions = [position for position, _ in share]
        return Produced(positions, answers, grading, seconds, self.engine.counts(), broken, problem)

    def _generate(self, requests: Sequence[Request], questions: Sequence[Question]) -> Iterator[Finished]:
        if self.conversations:
            return self.conversations.generate(self.engine, requests, questions)
        return self.engine.generate(requests)

    def _told(self, rollout: Rollout) -> dict[str, list[str]]:
        """What rewards may take of an answer beside the columns of its question."""
        return {TURNS: turns_of(rollout, self.decode)} if self.conversations else {}

    def _sampling(self, question: Question, sampling: Sampling) -> Sampling:
        """With the stop strings of the question's source, if it has any of its own."""
        return sampling if question.stop is None else replace(sampling, stop=Stops(question.stop, self.decode))

    def join(self, produced: Produced) -> Answers:
        """The answers of all ranks, graded; all ranks call it together.

        Raises:
            RolloutError: on every rank, where the engine of one failed.
            RewardError: on every rank, where the reward of an answer is no number.
        """
        fail_together(self.world, produced.problem)
        start = time.perf_counter()
        grades = agree(self.world, produced.grading.finish)
        seconds = time.perf_counter() - start
        cost = (
            *(grades.timed_out, grades.failed, grades.failures),
            *(produced.seconds, seconds, produced.engine, produced.broken),
        )
        of_question: dict[int, dict[int, Answer]] = {position: {} for position in produced.positions}
        of_answers = grades.parts or ({},) * len(grades.reward)
        graded = zip(produced.answers, grades.reward, grades.key, of_answers, strict=True)
        for (finished, text), reward, key, parts in graded:
            position = produced.positions[finished.request]
            of_question[position][finished.sample] = Answer(finished.rollout, text, reward, key, parts)
        mine = [
            (position, [samples[sample] for sample in range(len(samples))])
            for position, samples in of_question.items()
            if self.world.rank % self.engine.ranks == 0
        ]
        of_ranks = zip(*self.world.gather(cost), strict=True)
        timed_out, failed, failures, generate_seconds, grade_seconds, counts, broken = of_ranks
        joined = self.world.join(mine)
        self.tokens += sum(answer.rollout.tokens for answers in joined for answer in answers)
        found = by_kind(chain.from_iterable(failures))
        self._untold += [str(one) for one in found if one.kind not in self._known]
        self._known |= {one.kind for one in found}
        return Answers(
            of_question=joined,
            timed_out=sum(timed_out),
            failed=sum(failed),
            generate_seconds=max(generate_seconds),
            grade_seconds=max(grade_seconds),
            engine=EngineCounts(
                prompt_tokens=sum(of_rank.prompt_tokens for of_rank in counts),
                cached_tokens=sum(of_rank.cached_tokens for of_rank in counts),
                asleep_seconds=max(of_rank.asleep_seconds for of_rank in counts),
            ),
            broken=sum(of_rank or 0 for of_rank in broken) if self.conversations else None,
            failures=found,
        )

    def news(self) -> list[str]:
        """A sentence about each kind of failure of a reward that has not been told yet."""
        untold, self._untold = self._untold, []
        return untold
