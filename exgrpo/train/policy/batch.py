"""From graded groups to mini-batches of rows with advantages, and from rows to padded micro-batches.

B rows of a micro-batch, L padded length, P prompt tokens, R response tokens.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from exgrpo.kernels import group_advantage
from exgrpo.train.config import ObjectiveConfig
from exgrpo.train.policy.mismatch import truncated_weight
from exgrpo.train.records import Group, TokenIds

IGNORED = -100


@dataclass(frozen=True, eq=False)
class Row:
    """One trajectory as the policy sees it.

    Attributes:
        prompt: [P] token ids.
        response: [R] token ids, R >= 1.
        old_log_prob: [R] fp32 log-probs of the policy its ratios refer to.
        advantage: the same for all its tokens.
        replayed: whether it comes from the experience buffer.
        weight: [R] fp32 factors of the advantage, by token; None: 1.
    """

    prompt: TokenIds
    response: TokenIds
    old_log_prob: npt.NDArray[np.float32]
    advantage: float = 0.0
    replayed: bool = False
    weight: npt.NDArray[np.float32] | None = None

    @property
    def length(self) -> int:
        """Tokens the model reads: the last response token is predicted, never read."""
        return len(self.prompt) + len(self.response) - 1


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """The rows of one optimiser step over all ranks, and what their losses are divided by.

    Attributes:
        rows: those that can carry a gradient.
        normalizer: divisor of the summed token objectives.
        tokens: response tokens of all rows, left-out ones included.
    """

    rows: tuple[Row, ...]
    normalizer: float
    tokens: int

    @property
    def has_advantage(self) -> bool:
        """Whether any row says what to learn; one that is not a number counts, so that it is noticed."""
        return any(row.advantage != 0 for row in self.rows)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Tensors of one forward pass. Position t predicts the token at t + 1.

    Rows are padded on the right. Causal attention then needs no mask: no real token can see a pad.

    Attributes:
        tokens: [B, L] int64 input ids.
        target: [B, L] int64, the response token predicted there, -100 elsewhere.
        old_log_prob: [B, L] fp32, 0 where target is -100.
        advantage: [B] fp32, or [B, L] where tokens have weights of their own.
        replayed: [B] bool.
    """

    tokens: torch.Tensor
    target: torch.Tensor
    old_log_prob: torch.Tensor
    advantage: torch.Tensor
    replayed: torch.Tensor


def build_rows(
    groups: Sequence[Group],
    prompt: Callable[[int], TokenIds],
    *,
    scale_by_std: bool = False,
    mismatch_cap: float = math.inf,
) -> list[list[Row]]:
    """The rows of each group with their advantages: reward minus the mean over all K rows (Dr.GRPO).

    Where a group has recomputed log-probs, the ratios of its fresh rows refer to those, and the step from the engine
    that sampled to the trainer is weighed by truncated importance sampling: min(pi_trainer / pi_engine, mismatch_cap).
    """
    reward = torch.tensor([row.reward for group in groups for row in group.rows], dtype=torch.float32)
    index = torch.tensor([i for i, group in enumerate(groups) for _ in group.rows], dtype=torch.int64)
    advantages = iter(group_advantage(reward, index, scale_by_std=scale_by_std).tolist())
    return [_rows_of(group, prompt(group.question), advantages, mismatch_cap) for group in groups]


def _rows_of(group: Group, prompt: TokenIds, advantages: Iterator[float], mismatch_cap: float) -> list[Row]:
    rows = []
    for i, trajectory in enumerate(group.rows):
        replayed = trajectory is group.replayed
        row = Row(prompt, trajectory.response, trajectory.log_prob, next(advantages), replayed)
        if group.recomputed is not None and not replayed:
            own = group.recomputed[i]
            weight = truncated_weight(own, trajectory.log_prob, mismatch_cap)
            row = dataclasses.replace(row, old_log_prob=own, weight=weight)
        rows.append(row)
    return rows


def build_minibatches(
    rows: Sequence[Sequence[Row]],
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
        objective: its normalisation and entropy coefficient.
        max_tokens: L_max of the constant normalisation.
    """
    parts = np.array_split(rng.permutation(len(rows)), min(count, len(rows)))
    return [_minibatch([row for i in part for row in rows[i]], objective, max_tokens) for part in parts]


def _minibatch(rows: list[Row], objective: ObjectiveConfig, max_tokens: int) -> MiniBatch:
    tokens = sum(len(row.response) for row in rows)
    if objective.normalize == "constant":
        normalizer = len(rows) * max_tokens
    elif objective.normalize == "token":
        normalizer = tokens
    else:
        # The objective is positively homogeneous in the advantage, so 1/|o| may be put there.
        normalizer = len(rows)
        rows = [dataclasses.replace(row, advantage=row.advantage / len(row.response)) for row in rows]
    if objective.entropy_coef == 0:
        rows = [row for row in rows if row.advantage != 0]
    return MiniBatch(tuple(rows), float(normalizer), tokens)


def schedule(lengths: Sequence[int], budget: int, ranks: int) -> list[list[list[int]]]:
    """Spread rows over ranks and into micro-batches.

    Longest first, each row goes to the rank with the fewest tokens so far; each rank then groups its rows, which
    are sorted by length, so that rows * longest <= budget. Every rank gets the same number of micro-batches
    (empty ones at the end), because ranks that disagree on the number of passes wait for each other for ever.

    Returns:
        for each rank its micro-batches, each a list of indices into `lengths`.
    """
    load = [0] * ranks
    share: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = load.index(min(load))
        load[rank] += lengths[i]
        share[rank].append(i)
    batches = [_group(indices, lengths, budget) for indices in share]
    most = max(len(of_rank) for of_rank in batches)
    return [of_rank + [[] for _ in range(most - len(of_rank))] for of_rank in batches]


def _group(indices: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    groups: list[list[int]] = []
    for i in indices:
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def collate(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    """Pad rows to a micro-batch. No rows: one row of two tokens without a target, which weighs nothing."""
    length = max((row.length for row in rows), default=2)
    shape = (max(len(rows), 1), length)
    tokens, target = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
    old_log_prob = np.zeros(shape, np.float32)
    for i, row in enumerate(rows):
        tokens[i, : row.length] = np.concatenate([row.prompt, row.response[:-1]])
        span = slice(len(row.prompt) - 1, row.length)
        target[i, span] = row.response
        old_log_prob[i, span] = row.old_log_prob
    advantage = np.array([row.advantage for row in rows] or [0.0], np.float32)
    if any(row.weight is not None for row in rows):
        advantage = np.repeat(advantage[:, None], length, axis=1)
        for i, row in enumerate(rows):
            if row.weight is not None:
                advantage[i, len(row.prompt) - 1 : row.length] *= row.weight
    replayed = np.array([row.replayed for row in rows] or [False])
    arrays = (tokens, target, old_log_prob, advantage, replayed)
    return MicroBatch(*(torch.from_numpy(array).to(device, non_blocking=True) for array in arrays))
