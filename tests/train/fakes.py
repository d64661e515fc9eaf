"""Stand-ins for the model, so that the loop can be watched without one."""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from exgrpo.train.answers import Answerer
from exgrpo.train.batch import MiniBatch, Row
from exgrpo.train.data import Question, QuestionSet
from exgrpo.train.policy import Score, UpdateStats
from exgrpo.train.ratios import BINS
from exgrpo.train.records import Rollout, TokenIds
from exgrpo.train.reward import Grades
from exgrpo.train.rollout import Sampling

EOS = 1
RIGHT = 7


class LoneWorld:
    """A process group of one."""

    rank, size, is_main = 0, 1, True
    device = torch.device("cpu")

    def gather(self, value):
        return [value]

    def split(self, items):
        return list(enumerate(items))

    def join(self, share):
        return [item for _, item in sorted(share, key=lambda pair: pair[0])]


class ScriptedEngine:
    """Answers question q with tokens [q + 100, verdict, noise..., EOS], right as often as `skill[q]` says."""

    def __init__(self, skill: dict[int, float]) -> None:
        self.skill = skill
        self.calls: list[dict[int, int]] = []
        self.log: deque[str] = deque()

    def generate(self, prompts: Sequence[TokenIds], counts: Sequence[int], sampling: Sampling, seed: int):
        rng = np.random.default_rng(seed)
        self.log.append("generate")
        self.calls.append({int(prompt[0]): count for prompt, count in zip(prompts, counts, strict=True)})
        answers = []
        for prompt, count in zip(prompts, counts, strict=True):
            question = int(prompt[0])
            right = round(self.skill[question] * count)
            of_question = []
            for i in range(count):
                noise = rng.integers(10, 90, rng.integers(1, 5))
                ids = np.array([question + 100, RIGHT if i < right else 8, *noise, EOS], np.int32)
                of_question.append(Rollout(ids, finished=True))
            answers.append(of_question)
        return answers

    def push_weights(self, weights: Iterable) -> None:
        assert list(weights) == ["weights"]
        self.log.append("push")

    def sleep(self) -> None:
        self.log.append("sleep")

    def wake(self) -> None:
        self.log.append("wake")


class MarkGrader:
    """1 where the second token is RIGHT; counts what it saw."""

    def grade(self, answers: Sequence[tuple[str, str]]) -> Grades:
        rewards = tuple(float(text.split()[1] == str(RIGHT)) for text, _ in answers)
        return Grades(rewards, timed_out=0, failed=0)


def fake_score(response: TokenIds, version: int) -> Score:
    """Log-probs and entropies that depend on the tokens and on how often the policy was updated."""
    ids = response.astype(np.float32)
    return Score(log_prob=-(ids % 11 + 1 + version) / 10, entropy=((ids * 7 + version) % 13) / 10)


class RecordingPolicy:
    """Scores by `fake_score` and keeps the mini-batches it was updated on."""

    def __init__(self) -> None:
        self.world = LoneWorld()
        self.version = 0
        self.learning_rate = 1e-3
        self.updates: list[tuple[MiniBatch, bool]] = []
        self.scored: list[list[Row]] = []

    def score(self, rows: Sequence[Row]) -> list[Score]:
        self.scored.append(list(rows))
        return [fake_score(row.response, self.version) for row in rows]

    def update(self, minibatch: MiniBatch, objective, *, clip: bool) -> UpdateStats:
        self.updates.append((minibatch, clip))
        self.version += 1
        counts = torch.zeros(2, BINS, dtype=torch.int64)
        return UpdateStats(0.0, 1.0, self.version % 3 != 0, 0.0, 1.0, 1.0, 1.0, 1.0, counts)

    def weights(self):
        return ["weights"]


def question_set(count: int) -> QuestionSet:
    questions = tuple(Question(i, (i, 2), f"question {i}", "gold", "fake") for i in range(count))
    return QuestionSet(questions, dropped_long=0)


def answerer(engine: ScriptedEngine) -> Answerer:
    return Answerer(engine, MarkGrader(), lambda ids: " ".join(map(str, ids)), LoneWorld())
