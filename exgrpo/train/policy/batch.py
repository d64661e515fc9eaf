"""From graded groups to mini-batches of rows with advantages, and the tensors of micro-batches.

P prompt tokens, R response tokens.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from exgrpo.kernels import group_advantage
from exgrpo.train.experience.weighing import Weighed
from exgrpo.train.objective.settings import ObjectiveConfig
from exgrpo.train.policy.mismatch import truncated_weight
from exgrpo.train.policy.segments import Segments
from exgrpo.train.records import Group, Mask, TokenIds, Trajectory, Written

IGNORED = -100
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class TokenSequence(Written):
    """A prompt and a response to it, as the policy reads them.

    Attributes:
        prompt: [P] token ids.
        response: [R] token ids, R >= 1.
        written: [R], whether the policy wrote the token, and is scored there; None: all of them.
    """

    prompt: TokenIds
    response: TokenIds
    written: Mask | None = field(default=None, kw_only=True)

    @property
    def length(self) -> int:
        """Tokens the model reads: the last response token is predicted, never read."""
        return len(self.prompt) + len(self.response) - 1

    @property
    def target(self) -> npt.NDArray[np.int64]:
        """[R] what is predicted, -100 for observations."""
        response = self.response.astype(np.int64)
        return response if self.written is None else np.where(self.written, response, IGNORED)

    @property
    def predicting(self) -> slice:
        """The R positions that predict the response."""
        return slice(len(self.prompt) - 1, self.length)


@dataclass(frozen=True, eq=False)
class TrainingRow(TokenSequence):
    """One trajectory as the loss takes it.

    Attributes:
        old_log_prob: [R] fp32 log-probs of the policy its ratios refer to.
        advantage: the same for all its tokens.
        replayed: whether it comes from the experience buffer.
        weight: [R] fp32 factors of the advantage, by token; None: 1.
        masked: whether its group is outside the trained band, or itself left out. It then counts in what losses are
            divided by, and carries no gradient.
        reference_log_prob: [R] fp32 log-probs of the policy that a divergence refers to; None: there is none.
    """

    old_log_prob: Floats
    advantage: float = 0.0
    replayed: bool = False
    weight: Floats | None = None
    masked: bool = False
    reference_log_prob: Floats | None = None


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """The rows of one optimiser step over all ranks, and what their losses are divided by.

    Attributes:
        rows: those that can carry a gradient.
        normalizer: divisor of the summed token objectives.
        tokens: response tokens of all rows, left-out ones included, and no observations.
        fresh_tokens: those of rows that are not replayed.
    """

    rows: tuple[TrainingRow, ...]
    normalizer: float
    tokens: int
    fresh_tokens: int

    @property
    def has_advantage(self) -> bool:
        """Whether any row says what to learn; one that is not a number counts, so that it is noticed."""
        return any(row.advantage != 0 for row in self.rows)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Tensors of one forward pass; `layout` makes them.

    Padded, B rows of at most L tokens: position t predicts the token at t + 1. Packed, N tokens without padding, which
    predict the T response tokens.

    Attributes:
        tokens: [B, L] or [1, N] int64 input ids.
        target: [B, L] or [T] int64, the response token that is predicted, -100 for none: pads and observations.
        segments: where packed tokens belong; None: the batch is padded.
    """

    tokens: torch.Tensor
    target: torch.Tensor
    segments: Segments | None = field(default=None, kw_only=True)


@dataclass(frozen=True, eq=False)
class MicroBatch(TokenBatch):
    """Tensors of one forward pass with a loss.

    Attributes:
        old_log_prob: fp32, shaped like the target, 0 where that is -100.
        advantage: fp32, [B], or shaped like the target.
        replayed: bool, [B], or shaped like the target.
        lengths: [N] int64, targets of each row, in their order.
        reference_log_prob: fp32, shaped like the target; None: there is no reference.
    """

    old_log_prob: torch.Tensor
    advantage: torch.Tensor
    replayed: torch.Tensor
    lengths: torch.Tensor
    reference_log_prob: torch.Tensor | None = field(default=None, kw_only=True)


def advantages(
    groups: Sequence[Group], *, scale_by_std: bool = False, leave_one_out: bool = False
) -> list[list[float]]:
    """Of the rows of each group: net reward minus the mean over all rows (Dr.GRPO).

    Where a group's replayed rows have stored advantages, these stay, and the mean is that of the fresh rows.

    Args:
        groups: graded groups of one step.
        scale_by_std: divide by the standard deviation of the group's rewards.
        leave_one_out: minus the mean over the other rows (RLOO, arXiv 2402.14740), which is n / (n - 1) times as much.
    """
    if not groups:
        return []
    counted = [group.fresh if group.stored_advantage else group.rows for group in groups]
    reward = torch.tensor([row.net_reward for rows in counted for row in rows], dtype=torch.float32)
    index = torch.tensor([i for i, rows in enumerate(counted) for _ in rows], dtype=torch.int64)
    advantage = group_advantage(reward, index, scale_by_std=scale_by_std)
    if leave_one_out:
        rows_of = torch.bincount(index)[index]
        advantage *= rows_of / (rows_of - 1).clamp(min=1)
    shared = iter(advantage.tolist())
    return [[*islice(shared, len(rows)), *group.stored_advantage] for group, rows in zip(groups, counted, strict=True)]


def build_rows(
    groups: Sequence[Group],
    of_groups: Sequence[Sequence[float]],
    prompt: Callable[[int], TokenIds],
    *,
    replayed: Sequence[Weighed] | None = None,
    mismatch_cap: float = math.inf,
    trained: Callable[[Group], bool] = lambda group: True,
    learnt: Callable[[Trajectory], bool] = lambda row: True,
) -> list[list[TrainingRow]]:
    """The rows of each group, with their advantages and the log-probs that their ratios refer to.

    Where the log-probs of a fresh row are the engine's, its ratios refer to the trainer's, which the group's scores
    hold, and the step from the engine that sampled to the trainer is weighed by truncated importance sampling:
    min(pi_trainer / pi_engine, mismatch_cap).

    Args:
        groups: graded groups of one step.
        of_groups: the advantages of their rows.
        prompt: [P] token ids of a question, by its index.
        replayed: the terms of all replayed rows, in their order; None: ratios to the policies that wrote them.
        mismatch_cap: see above.
        trained: whether a group is in the trained band; the rows of others are masked.
        learnt: whether anything is learnt from a row; others are masked.
    """
    if replayed is None:
        replayed = [Weighed(row.log_prob) for group in groups for row in group.replayed]
    weighed = iter(replayed)
    rows = []
    for group, of_group in zip(groups, of_groups, strict=True):
        asked, masked, count = prompt(group.question), not trained(group), len(group.fresh)
        terms = zip(group.fresh, _ratio_terms(group, mismatch_cap), of_group[:count], strict=True)
        of_fresh = [
            TrainingRow(
                asked,
                row.response,
                old,
                advantage,
                weight=weight,
                masked=masked or not learnt(row),
                written=row.written,
            )
            for row, (old, weight), advantage in terms
        ]
        of_past = [
            TrainingRow(
                asked,
                row.response,
                term.reference,
                advantage if term.advantage is None else term.advantage,
                replayed=True,
                weight=term.factor,
                masked=masked or not learnt(row),
                written=row.written,
            )
            for row, advantage, term in zip(group.replayed, of_group[count:], weighed, strict=False)
        ]
        rows.append([*of_fresh, *of_past])
    return rows


def _ratio_terms(group: Group, mismatch_cap: float) -> list[tuple[Floats, Floats | None]]:
    """For each fresh row the log-probs [R] that its ratios refer to, and its weights [R] if it has any."""
    terms: list[tuple[Floats, Floats | None]] = [(row.log_prob, None) for row in group.fresh]
    for i, row in enumerate(group.fresh):
        if row.behaviour == "engine":
            own = group.scores[i].log_prob
            terms[i] = (own, truncated_weight(own, row.log_prob, mismatch_cap))
    return terms


def build_minibatches(
    rows: Sequence[Sequence[TrainingRow]],
    count: int,
    rng: np.random.Generator,
    objective: ObjectiveConfig,
    max_tokens: int,
) -> list[MiniBatch]:
    """Deal whole groups at random into `count` mini-batches of nearly equal size (fewer where groups are fewer).

    Args:
        rows: the rows of each group.
        count: optimiser steps.
        rng: advanced once.
        objective: its normalisation, and the coefficients of its terms without an advantage.
        max_tokens: L_max of the constant normalisation.
    """
    if not rows:
        return []
    parts = np.array_split(rng.permutation(len(rows)), min(count, len(rows)))
    return [_minibatch([row for i in part for row in rows[i]], objective, max_tokens) for part in parts]


def _minibatch(rows: list[TrainingRow], objective: ObjectiveConfig, max_tokens: int) -> MiniBatch:
    tokens = sum(row.tokens for row in rows)
    if objective.normalize == "constant":
        normalizer = len(rows) * max_tokens
    elif objective.normalize == "token":
        normalizer = tokens
    else:
        # The objective is positively homogeneous in the advantage, so 1/|o| may be put there.
        normalizer = len(rows)
        rows = [dataclasses.replace(row, advantage=row.advantage / row.tokens) for row in rows]
    for_all = objective.entropy_coef > 0 or objective.kl_coef > 0
    learnt = [row for row in rows if not row.masked and (row.advantage != 0 or for_all)]
    fresh_tokens = sum(row.tokens for row in rows if not row.replayed)
    return MiniBatch(tuple(learnt), float(normalizer), tokens, fresh_tokens)
