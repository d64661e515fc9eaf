"""ExGRPO in TRL on written answers, with all that was written and all that came to the loss; and plain models of what
each composition trains on.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from exgrpo.integrations.trl import ExGRPOConfig, ExGRPOTrainer
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.replay import PlannedGroup
from tests.integrations.trl_trainers import WrittenAnswers, options, questions, reward, tokenizer

K, B = 4, 4
Answer = tuple[int, tuple[int, ...]]
"""A question and a response to it."""


class Row(NamedTuple):
    """A row of a micro-batch that has a token."""

    answer: Answer
    replayed: bool
    advantage: float
    old: list[float]


class Written(NamedTuple):
    """A group of fresh answers of one generation."""

    question: int
    answers: list[Answer]
    rewards: list[float]

    @property
    def mean(self) -> float:
        return float(np.mean(self.rewards))

    @property
    def differs(self) -> bool:
        return len(set(self.rewards)) > 1


class Recorded(ExGRPOTrainer, WrittenAnswers):
    """Written answers; records what was written in each generation, and the inputs of the loss.

    Attributes:
        history: the groups of each generation, with those of refills appended.
        losses: the micro-batches of each generation, with their log-probs and losses.
    """

    def _answer(
        self, groups: Sequence[PlannedGroup], stored: StepBatch, *, behind: bool = False
    ) -> tuple[dict[str, Any], StepBatch]:
        output, batch = super()._answer(groups, stored, behind=behind)
        self.log_probs = getattr(self, "log_probs", {})
        written = []
        for number, group in enumerate(groups):
            rows = np.flatnonzero(batch.fresh & (batch.group == number))
            answers = [(group.question, tuple(batch.token[batch.at(row)].tolist())) for row in rows]
            self.log_probs |= {one: batch.old_log_prob[batch.at(row)] for one, row in zip(answers, rows, strict=True)}
            written.append(Written(group.question, answers, reward([list(ids) for _, ids in answers])))
        if behind:  # of the same generation
            self.history[-1] += written
            return output, batch
        self.history = [*getattr(self, "history", []), written]
        self.losses = [*getattr(self, "losses", []), []]
        return output, batch

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        log_prob, loss = self._log_probs(inputs), super()._compute_loss(model, inputs)
        self.losses[-1].append((inputs, log_prob, float(loss)))
        return loss

    def rows(self, generation: int) -> list[Row]:
        found = []
        for inputs, _, _ in self.losses[generation]:
            for i, length in enumerate(inputs["completion_mask"].sum(1).tolist()):
                if length == 0:
                    continue
                prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].tolist()
                answer = (self.question_of[tuple(prompt)], tuple(inputs["completion_ids"][i, :length].tolist()))
                advantage = inputs["advantages"][i].flatten()[0].item()
                old = inputs["old_per_token_logps"][i, :length].tolist()
                found.append(Row(answer, bool(inputs["replayed"][i]), advantage, old))
        return found


def trainer_of(folder: Path, model: Path, *, asked: int = B, rollout: Any = None, **changes: Any) -> Recorded:
    """Two micro-batches of 8 rows in one optimiser step, replay from the start, nothing retires, no entropy bonus."""
    changes = {
        "start_pass_rate": 0.0,
        "learning_rate": 1e-2,
        "gradient_accumulation_steps": 2,
        "entropy_coef": 0.0,
        "expire": [],
        "ratio": 1.0,
        **changes,
    }
    data = questions().select(range(asked))
    config = ExGRPOConfig(**options(folder, **changes))
    trainer = Recorded(str(model), reward, config, data, processing_class=tokenizer(), rollout_func=rollout)
    trainer.question_of = {tuple(ids): i for i, ids in enumerate(tokenizer()(list(data["prompt"]))["input_ids"])}
    return trainer


class Expected(NamedTuple):
    """Rows that a composition trains on.

    Attributes:
        fresh: exactly these.
        replayed: exactly this many.
        among: candidates of the replayed ones.
        whole: True if these are whole groups, each of them a list in `among`.
    """

    fresh: list[Answer]
    replayed: int
    among: list[list[Answer]]
    whole: bool = False


History = list[list[Written]]


def of_question(history: History, question: int) -> list[Answer]:
    return [one for groups in history for group in groups if group.question == question for one in group.answers]


def answers(groups: Sequence[Written]) -> list[Answer]:
    return [one for group in groups for one in group.answers]


def mixed(past: History, now: list[Written]) -> Expected:
    joined = {group.question: K - len(group.answers) for group in now}
    assert all(joined[q] == (min(2, len(of_question(past, q)))) for q in joined)
    return Expected(answers(now), sum(joined.values()), [of_question(past, q) for q in joined])


def again(past: History, now: list[Written]) -> Expected:
    return Expected(answers(now), 0, [])


def appended(past: History, now: list[Written]) -> Expected:
    stored = [of_question(past, group.question) for group in now]
    return Expected(answers(now), sum(min(2, len(of_group)) for of_group in stored), stored)


def beside(past: History, now: list[Written]) -> Expected:
    fresh = answers([group for group in now if group.differs] or now)
    stored = [answers(groups) for groups in past]
    return Expected(fresh, min(len(fresh) // 2, sum(map(len, stored))), stored)


def in_place(past: History, now: list[Written]) -> Expected:
    dead = [group for group in now if not group.differs]
    stored = [group.answers for groups in past for group in groups if group.differs]
    given = min(len(dead), len(stored))
    return Expected(answers([*(group for group in now if group.differs), *dead[given:]]), K * given, stored, True)


def buffer(past: History, now: list[Written]) -> Expected:
    assert len(now) == B // 2
    stored = [answers(groups) for groups in [*past, now]]
    return Expected([], min(B * K, sum(map(len, stored))), stored)


def stale(past: History, now: list[Written]) -> Expected:
    waited = [group.answers for group in (past[-1] if past else [])]
    return Expected([], sum(map(len, waited)), waited, True)


def rehearsal(past: History, now: list[Written]) -> Expected:
    stored = [of_question([*past, now], group.question) for group in now]
    return Expected(answers(now), 2 * len(stored[0]), stored, True)


def bapo(past: History, now: list[Written]) -> Expected:
    latest = {group.question: sum(group.rewards) for groups in past for group in groups}
    hard = now[B:]
    assert all(latest[group.question] <= 1 for group in hard)
    assert bool(len(past) % 2) <= (not hard)
    with_signal = [group for group in now[:B] if group.differs] or now[:B]
    batch = [*with_signal, *(group for group in hard if sum(group.rewards) > latest[group.question])][:B]
    names = {group.question for group in batch}
    stored = [group.answers for groups in past for group in groups if 0.2 < group.mean < 0.6]
    stored = [of_group for of_group in stored if of_group[0][0] not in names]
    return Expected(answers(batch), K * min(B - len(batch), len(stored)), stored, True)


METHODS: dict[str, tuple[Callable[[History, list[Written]], Expected], dict[str, Any]]] = {
    "mixed": (mixed, {"admit": "all", "replayed": 2, "trajectory": "random"}),
    "traced": (mixed, {"admit": "all", "replayed": 2, "trajectory": "random"}),
    "again": (again, {"admit": "nothing", "prioritise": "middle", "band": [0.0, 1.0], "cooldown": 1}),
    "appended": (appended, {"admit": "all", "replayed": 2, "trajectory": "random"}),
    "beside": (beside, {"admit": "all", "prioritise": "advantage", "advantage": "stored", "ratio": 0.5}),
    "in_place": (in_place, {"admit": "with_advantage", "prioritise": "newest"}),
    "buffer": (buffer, {"admit": "all", "prioritise": "random", "advantage": "stored", "ratio": 0.5}),
    "returning": (
        buffer,
        {"admit": "all", "prioritise": "least_used", "advantage": "stored", "ratio": 0.5, "band": [0.0, 1.0]},
    ),
    "stale": (stale, {"admit": "all", "lag": 1}),
    "rehearsal": (rehearsal, {"admit": "all", "prioritise": "least_used", "ratio": 0.5}),
    "bapo": (bapo, {"admit": "in_band", "band": [0.2, 0.6], "hard": 0.25, "prioritise": "random", "asked": 8}),
}
