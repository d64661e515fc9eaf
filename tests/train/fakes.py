"""Stand-ins for the model, so that the loop can be watched without one."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from exgrpo.train.common.distributed import ALONE, World
from exgrpo.train.common.functions import Term
from exgrpo.train.common.records import AllowedTokens, EngineCounts, Rollout, Score, TokenIds
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.data.questions import Question, QuestionSet
from exgrpo.train.policy.batch import MiniBatch
from exgrpo.train.policy.update import BINS, UpdateStats
from exgrpo.train.reward.names import DEFAULT
from exgrpo.train.reward.pool import Grades
from exgrpo.train.reward.worker import hashed
from exgrpo.train.rollout.answers import RolloutWorker
from exgrpo.train.rollout.engine import Finished, Request
from tests.train.batches import sets

EOS = 1
RIGHT = 7


def one_of_two(other: Callable[[Any], Any], device: torch.device = ALONE.device, rank: int = 0) -> World:
    """One of two ranks; `other(value)` is what the other one gives where this one gives `value`."""

    class Pair(World):
        def gather(self, value):
            return [value, other(value)]

    return Pair(rank, 2, device, None)


class ScriptedEngine:
    """Answers question q with tokens [q + 100, verdict, noise..., EOS], right at the rate `skill[q]`."""

    unrepeatable = None
    ranks = 1

    def __init__(self, skill: dict[int, float], *, free_log_prob: bool = False) -> None:
        self.free_log_prob = free_log_prob
        self.skill = skill
        self.calls: list[dict[int, int]] = []
        self.log: deque[str] = deque()

    def generate(self, requests: Sequence[Request]):
        rng = np.random.default_rng([request.seed for request in requests])
        self.log.append("generate")
        self.calls.append({int(request.prompt[0]): request.count for request in requests})
        answers = []
        for index, request in enumerate(requests):
            question = int(request.prompt[0])
            right = round(self.skill[question] * request.count)
            for i in range(request.count):
                noise = rng.integers(10, 90, rng.integers(1, 5))
                ids = np.array([question + 100, RIGHT if i < right else 8, *noise, EOS], np.int32)
                log_prob = engine_log_prob(ids) if request.sampling.log_prob else None
                allowed_tokens = AllowedTokens.from_lists(sets(ids)) if request.sampling.allowed_tokens else None
                answers.append(
                    Finished(index, i, Rollout(ids, finished=True, log_prob=log_prob, allowed_tokens=allowed_tokens))
                )
        yield from reversed(answers)  # no engine finishes them in order

    def counts(self) -> EngineCounts:
        return EngineCounts(prompt_tokens=10, cached_tokens=4, asleep_seconds=3.0)

    def push_weights(self, weights: Iterable) -> None:
        assert list(weights) == ["weights"]
        self.log.append("push")

    def sleep(self) -> None:
        self.log.append("sleep")

    def wake(self) -> None:
        self.log.append("wake")


def marked(text: str) -> float:
    """1 where the second token is RIGHT."""
    return float(text.split()[1] == str(RIGHT))


class ScriptedGrader:
    """Grades in the test's own process."""

    def __init__(self, reward: Callable[[str], float] = marked) -> None:
        self.reward = reward
        self.rewards: list[float] = []
        self.keys: list[int] = []

    def begin(self) -> "ScriptedGrader":
        return ScriptedGrader(self.reward)

    def add(self, response: str, gold: str, question: str, reward: str, columns: Mapping[str, Any]) -> None:
        self.rewards.append(self.reward(response))
        self.keys.append(hashed(response))

    def finish(self) -> Grades:
        return Grades(tuple(self.rewards), timed_out=0, failed=0, key=tuple(self.keys))


def engine_log_prob(response: TokenIds) -> np.ndarray:
    """Log-probs of an engine that differs from `fake_score` at version 0, by up to 0.3 nats either way."""
    return (-(response % 11 + 1) / 10 + (response % 7 - 3.0) / 10).astype(np.float32)


def fake_score(response: TokenIds, version: int, temperature: float = 1.0) -> Score:
    """Log-probs and entropies that depend on the tokens, on how often the policy was updated and on the temperature."""
    ids = response.astype(np.float32)
    entropy = ((ids * 7 + version) % 13) / 10
    # At another temperature other candidates have the lowest entropy.
    return Score(-(ids % 11 + 1 + version) / 10 / temperature, entropy if temperature == 1 else 2 - entropy)


class RecordingPolicy:
    """Scores by `fake_score`, in updates at a temperature, and keeps the mini-batches it was updated on."""

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature
        self.world = ALONE
        self.version = 0
        self.learning_rate = 1e-3
        self.updates: list[tuple[MiniBatch, bool]] = []
        self.terms: list[str] = []
        self.scored: list[tuple[StepBatch, float]] = []

    def score(self, batch: StepBatch, temperature: float) -> Score:
        self.scored.append((batch, temperature))
        return fake_score(batch.token, self.version, temperature)

    def update(
        self, minibatch: MiniBatch, *, clip: bool, term: Term = "shaped", keep_scores: bool = False
    ) -> UpdateStats:
        self.updates.append((minibatch, clip))
        self.terms.append(term)
        scores = fake_score(minibatch.batch.token, self.version, self.temperature) if keep_scores else None
        self.version += 1
        counts = torch.zeros(2, BINS, dtype=torch.int64)
        return UpdateStats(0.0, 1.0, self.version % 3 != 0, 0.0, 1.0, 1.0, 1.0, 1.0, 0, counts, scores)

    def weights(self):
        return ["weights"]


def question_set(count: int, reward: str = DEFAULT) -> QuestionSet:
    questions = tuple(Question(i, (i, 2), f"question {i}", "gold", "fake", reward) for i in range(count))
    return QuestionSet(questions)


def rollout_worker(engine: ScriptedEngine) -> RolloutWorker:
    return RolloutWorker(engine, ScriptedGrader(), lambda ids: " ".join(map(str, ids)), ALONE)
