"""Batches of a step as tests need them."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from exgrpo.train.common.columns import columns_of
from exgrpo.train.common.records import AllowedTokens, Rollout
from exgrpo.train.common.step_batch import TRAINER, StepBatch


@dataclass(frozen=True)
class Row:
    """An answer; log-probs and `response_mask` as one number for all tokens, or one for each."""

    reward: float = 0.0
    response: Sequence[int] = (1, 2)
    log_prob: Any = -0.5
    replayed: bool = False
    finished: bool = True
    response_mask: Any = True
    key: int = 0
    step: int = 1
    penalty: float = 0.0
    old_log_probs_from: int = TRAINER
    stored_advantage: float = np.nan
    replays: int = 0
    allowed_tokens: Sequence[Sequence[int]] | None = None
    question: int = 0


def make_batch(groups: Sequence[tuple[int, Sequence[Row]]], **columns: Any) -> StepBatch:
    """Groups (question, rows), fresh rows first; all are trained on, and the prompt of question q is [q, q + 1]."""
    rows = [row for _, of_group in groups for row in of_group]
    rollouts = [
        Rollout(
            np.array(row.response, np.int32),
            row.finished,
            response_mask=np.broadcast_to(np.asarray(row.response_mask, bool), len(row.response)),
            allowed_tokens=None if row.allowed_tokens is None else AllowedTokens.from_lists(row.allowed_tokens),
        )
        for row in rows
    ]
    batch = StepBatch.from_rollouts([question for question, _ in groups], [len(of) for _, of in groups], rollouts)
    names = ("reward", "replayed", "key", "step", "penalty", "old_log_probs_from", "stored_advantage", "replays")
    of_tokens = [np.broadcast_to(np.asarray(row.log_prob, np.float32), len(row.response)) for row in rows]
    batch.fill(
        prompt=[np.array([question, question + 1], np.int32) for question, _ in groups],
        old_log_prob=np.concatenate([np.empty(0, np.float32), *of_tokens]),
        chosen_entropy=np.full(len(rows), np.nan),
        trained=np.arange(len(groups)),
        **{name: [getattr(row, name) for row in rows] for name in names},
        **columns,
    )
    return batch


def rows_of(batch: StepBatch) -> list[SimpleNamespace]:
    """Each row with what the batch has of it, by name of the column; `question` and `prompt` are those of its group."""

    def row(i: int) -> SimpleNamespace:
        of_group = {name: getattr(batch, name)[batch.group[i]] for name in columns_of("group") if batch.has(name)}
        of_row = {name: getattr(batch, name)[i] for name in columns_of("row") if batch.has(name)}
        of_token = {name: getattr(batch, name)[batch.at(i)] for name in columns_of("token") if batch.has(name)}
        return SimpleNamespace(**of_group, **of_row, **of_token)

    return [row(i) for i in range(len(batch))]


def each(rows: Sequence[Row], **columns: Any) -> StepBatch:
    """Answers of which each is a group of its own, to its `question`."""
    return make_batch([(row.question, [row]) for row in rows], **columns)


def stored_rows(answers: StepBatch) -> list[Row]:
    """Stored answers as rows; `response` and `log_prob` are arrays, and a mask that is True everywhere is True."""

    def row(one: SimpleNamespace) -> Row:
        names = ("reward", "finished", "key", "step", "penalty", "old_log_probs_from", "replays")
        return Row(
            response=one.token,
            log_prob=one.old_log_prob,
            response_mask=True if one.response_mask.all() else one.response_mask,
            allowed_tokens=lists(one.allowed_tokens) if len(one.allowed_tokens.ids) else None,
            question=int(one.question),
            **{name: getattr(one, name).item() for name in names},
        )

    answers.fill(allowed_tokens=answers.column("allowed_tokens"))
    return [row(one) for one in rows_of(answers)]


def same(a: Row, b: Row, *, besides: Sequence[str] = ()) -> bool:
    """True if all that `stored_rows` knows of two answers is equal."""
    arrays = {"response", "log_prob", "response_mask"} - set(besides)
    names = set(vars(a)) - {"response", "log_prob", "response_mask", "replays", "stored_advantage", *besides}
    return all(getattr(a, name) == getattr(b, name) for name in names) and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays
    )


def sets(tokens: Sequence[int]) -> list[list[int]]:
    """Return sets of ids that tokens were drawn from: none, which means all, one or two."""
    return [list(range(token, token + token % 3)) for token in map(int, tokens)]


def lists(allowed_tokens: AllowedTokens | None) -> list[list[int]] | None:
    """Return the ids allowed for each token."""
    return None if allowed_tokens is None else [ids.tolist() for ids in allowed_tokens.lists()]


def trajectories(memory, question):
    """The stored answers to a question, oldest first."""
    return tuple(one for one in stored_rows(memory.table.stored()) if one.question == question)
