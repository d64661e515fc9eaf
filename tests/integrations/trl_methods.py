"""ExGRPO in TRL on written answers, with all that was written, chosen and came to the loss."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from exgrpo.integrations.trl import ExGRPOConfig
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.replay import PlannedGroup
from tests.integrations.trl_trainers import WrittenExGRPO, options, questions, reward, tokenizer

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


class Recorded(WrittenExGRPO):
    """Written answers; records what was written in each generation, what is trained on, and the inputs of the loss.

    Attributes:
        history: the groups of each generation, with those of refills appended.
        settled: the batch of each generation whose `trained` groups the loss is of.
        losses: the micro-batches of each generation, with their log-probs and losses.
    """

    def _answer(
        self, groups: Sequence[PlannedGroup], stored: StepBatch, *, late: bool = False
    ) -> tuple[dict[str, Any], StepBatch]:
        output, batch = super()._answer(groups, stored, late=late)
        self.log_probs = getattr(self, "log_probs", {})
        written = []
        for number, group in enumerate(groups):
            rows = np.flatnonzero(batch.fresh & (batch.group == number))
            answers = [(group.question, tuple(batch.token[batch.at(row)].tolist())) for row in rows]
            self.log_probs |= {one: batch.old_log_prob[batch.at(row)] for one, row in zip(answers, rows, strict=True)}
            written.append(Written(group.question, answers, reward([list(ids) for _, ids in answers])))
        if late:  # of the same generation
            self.history[-1] += written
            return output, batch
        self.history = [*getattr(self, "history", []), written]
        self.losses = [*getattr(self, "losses", []), []]
        return output, batch

    def _trained_batch(
        self, output: dict[str, torch.Tensor], batch: StepBatch, planned: int
    ) -> dict[str, torch.Tensor]:
        self.settled = [*getattr(self, "settled", []), batch]
        return super()._trained_batch(output, batch, planned)

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
    replay = {"start_pass_rate": 0.0, "expire": [], "ratio": 1.0}
    update = {"learning_rate": 1e-2, "gradient_accumulation_steps": 2, "entropy_coef": 0.0}
    data = questions().select(range(asked))
    config = ExGRPOConfig(**options(folder, **{**replay, **update, **changes}))
    trainer = Recorded(str(model), reward, config, data, processing_class=tokenizer(), rollout_func=rollout)
    trainer.question_of = {tuple(ids): i for i, ids in enumerate(tokenizer()(list(data["prompt"]))["input_ids"])}
    return trainer


def answers(groups: Sequence[Written]) -> list[Answer]:
    return [one for group in groups for one in group.answers]


METHODS: dict[str, dict[str, Any]] = {
    "mixed": {"admit": "all", "replayed": 2, "trajectory": "random"},
    "appended": {"admit": "all", "replayed": 2, "trajectory": "random"},
    "beside": {"admit": "all", "prioritise": "advantage", "advantage": "stored", "ratio": 0.5},
    "in_place": {"admit": "with_advantage", "prioritise": "newest"},
    "buffer": {"admit": "all", "prioritise": "random", "advantage": "stored", "ratio": 0.5},
    "stale": {"admit": "all", "lag": 1},
    "rehearsal": {"admit": "all", "prioritise": "least_used", "ratio": 0.5},
    "bapo": {"admit": "in_band", "band": [0.2, 0.6], "hard": 0.25, "prioritise": "random", "asked": 8},
}
"""Options of compositions; what they choose is tested with the replay."""
