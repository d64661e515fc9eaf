"""Questions in, graded answers out: generation and grading, spread over all ranks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from exgrpo.train.data import Question
from exgrpo.train.distributed import World
from exgrpo.train.records import Rollout, TokenIds
from exgrpo.train.reward import Grader
from exgrpo.train.rollout import RolloutEngine, Sampling
from exgrpo.train.seeds import derive_seed


@dataclass(frozen=True, eq=False)
class Answer:
    """A rollout, its text without the EOS token, and the verifier's reward."""

    rollout: Rollout
    text: str
    reward: float


@dataclass(frozen=True, eq=False)
class Answers:
    """The answers to each question, and what it took.

    Attributes:
        of_question: for each question its answers.
        timed_out: answers that were graded 0 because grading took too long, over all ranks.
        failed: answers graded 0 because the reward function failed.
        generate_seconds: time in the engine, the slowest rank's.
        grade_seconds: time in the grader, the slowest rank's.
    """

    of_question: list[list[Answer]]
    timed_out: int
    failed: int
    generate_seconds: float
    grade_seconds: float

    @property
    def rewards(self) -> np.ndarray:
        """All rewards, flat."""
        return np.array([answer.reward for answers in self.of_question for answer in answers])

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts, flat."""
        return [answer.rollout for answers in self.of_question for answer in answers]


class Answerer:
    """Generates and grades.

    Args:
        engine: this rank's rollout engine; it sleeps except while it generates.
        grader: this rank's grader.
        decode: turns token ids into text; the inverse of the tokenizer, special tokens kept.
        world: the ranks.
    """

    def __init__(self, engine: RolloutEngine, grader: Grader, decode: Callable[[TokenIds], str], world: World) -> None:
        self.engine = engine
        self.grader = grader
        self.decode = decode
        self.world = world
        self.tokens = 0
        """Response tokens generated so far, over all ranks."""

    def answer(self, questions: Sequence[Question], counts: Sequence[int], sampling: Sampling, seed: int) -> Answers:
        """Sample counts[i] answers to questions[i] and grade them; the result is the same on every rank."""
        share = self.world.split(list(zip(questions, counts, strict=True)))
        start = time.perf_counter()
        self.engine.wake()
        rollouts = self.engine.generate(
            [np.array(question.prompt, dtype=np.int32) for _, (question, _) in share],
            [count for _, (_, count) in share],
            sampling,
            derive_seed(seed, "rank", self.world.rank),
        )
        self.engine.sleep()
        generated = time.perf_counter()
        texts = [[self._text(rollout) for rollout in of_question] for of_question in rollouts]
        golds = [question.gold for _, (question, _) in share]
        grades = self.grader.grade(
            [(text, gold) for gold, of_question in zip(golds, texts, strict=True) for text in of_question]
        )
        graded = time.perf_counter()
        rewards = iter(grades.reward)
        mine = [
            (
                position,
                [Answer(r, text, next(rewards)) for r, text in zip(of_question, of_texts, strict=True)],
            )
            for (position, _), of_question, of_texts in zip(share, rollouts, texts, strict=True)
        ]
        costs = self.world.gather((grades.timed_out, grades.failed, generated - start, graded - generated))
        timed_out, failed, generate_seconds, grade_seconds = zip(*costs, strict=True)
        of_question = self.world.join(mine)
        self.tokens += sum(len(answer.rollout.response) for answers in of_question for answer in answers)
        return Answers(
            of_question=of_question,
            timed_out=sum(timed_out),
            failed=sum(failed),
            generate_seconds=max(generate_seconds),
            grade_seconds=max(grade_seconds),
        )

    def _text(self, rollout: Rollout) -> str:
        return self.decode(rollout.response[:-1] if rollout.finished else rollout.response)
