"""From a graded batch to mini-batches of rows with advantages, and the tensors of micro-batches."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from exgrpo.kernels import group_advantage
from exgrpo.train.common.step_batch import ENGINE, Floats, Ints, StepBatch
from exgrpo.train.config.objective import ObjectiveConfig
from exgrpo.train.policy.segments import Segments
from exgrpo.train.replay.contract import PRESENT

IGNORED = -100


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """The rows of one optimiser step over all ranks, and what their losses are divided by.

    Attributes:
        rows: [n] those that can carry a gradient, by number in the step's batch.
        batch: these rows, in their order.
        normalizer: divisor of the summed token objectives.
        tokens: response tokens of all rows, left-out ones included, and no observations.
        fresh_tokens: those of rows that are not replayed.
    """

    rows: Ints
    batch: StepBatch
    normalizer: float
    tokens: int
    fresh_tokens: int

    @property
    def has_advantage(self) -> bool:
        """Whether any row says what to learn; one that is not a number counts, so that it is noticed."""
        return bool((self.batch.advantage != 0).any())

    def refer_to(self, batch: StepBatch | None, mismatch_cap: float) -> None:
        """Weigh the fresh rows by the `log_prob` of the step's batch; None: this update itself computes them."""
        fresh = np.flatnonzero(self.batch.fresh)
        if batch is not None and len(fresh):
            self.batch.put(fresh, log_prob=batch.log_prob[batch.places(self.rows[fresh])])
        weigh_fresh(self.batch, mismatch_cap)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Tensors of one forward pass; `layout` makes them.

    Padded, B rows of at most L tokens: position t predicts the token at t + 1. Packed, N tokens without padding, which
    predict the T response tokens.

    Attributes:
        tokens: [B, L] or [1, N] int64 input ids.
        target: [B, L] or [T] int64, the response token that is predicted, -100 for none: pads and observations.
        targets: how many targets there are.
        segments: where packed tokens belong; None: the batch is padded.
        kept: ids [M] int32 and offsets [targets' places + 1] int64, the words that each target was drawn from, as
            `exgrpo.kernels` takes them; None: the whole vocabulary.
    """

    tokens: torch.Tensor
    target: torch.Tensor
    targets: int
    segments: Segments | None = field(default=None, kw_only=True)
    kept: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, kw_only=True)


@dataclass(frozen=True, eq=False)
class MicroBatch(TokenBatch):
    """Tensors of one forward pass with a loss, 0 at pads.

    Attributes:
        old_log_prob: fp32, shaped like the target, of the policy that ratios refer to.
        advantage: fp32, shaped like the target.
        replayed: bool, shaped like the target.
        lengths: [N] int64, targets of each row, in their order.
        active: how many targets have an advantage other than 0.
        reference_log_prob: fp32, shaped like the target; None: there is no reference.
    """

    old_log_prob: torch.Tensor
    advantage: torch.Tensor
    replayed: torch.Tensor
    lengths: torch.Tensor
    active: int
    reference_log_prob: torch.Tensor | None = field(default=None, kw_only=True)


def advantages(batch: StepBatch, *, scale_by_std: bool = False, leave_one_out: bool = False) -> None:
    """Fill `advantage` in the groups that are trained on: net reward minus the mean over all rows (Dr.GRPO).

    Rows with a stored advantage keep that one and do not count in the mean. Other groups have NaN.

    Args:
        batch: graded rows.
        scale_by_std: divide by the standard deviation of the group's rewards.
        leave_one_out: minus the mean over the other rows (RLOO, arXiv 2402.14740), which is n / (n - 1) times as much.
    """
    rows, advantage = batch.rows_of(batch.trained), np.full(len(batch), np.nan)
    if batch.has("stored_advantage"):
        advantage[rows] = batch.stored_advantage[rows]
    counted = rows[np.isnan(advantage[rows])]
    group = torch.from_numpy(batch.group[counted])
    reward = torch.from_numpy(batch.net_reward[counted].astype(np.float32))
    of_counted = group_advantage(reward, group, scale_by_std=scale_by_std)
    if leave_one_out:
        rows_of = torch.bincount(group)[group]
        of_counted *= rows_of / (rows_of - 1).clamp(min=1)
    advantage[counted] = of_counted.numpy()
    batch.fill(advantage=advantage)


def weigh_fresh(batch: StepBatch, mismatch_cap: float = math.inf) -> None:
    """Put the log-probs that the ratios of fresh rows refer to, and their factors if there are any.

    These log-probs are those of the policy before the update, or `PRESENT` where only the update will know them: the
    batch has no `log_prob` then. Where `old_log_prob` is the engine's, the step from the engine that sampled to the
    trainer is weighed by truncated importance sampling: min(pi_trainer / pi_engine, mismatch_cap).

    Args:
        batch: its rows.
        mismatch_cap: see above.
    """
    fresh = np.flatnonzero(batch.fresh)
    if not batch.has("log_prob"):
        batch.put(fresh, ratio_log_prob=np.full(batch.length[fresh].sum(), PRESENT))
        return
    of_engine = fresh[batch.behaviour[fresh] == ENGINE]
    batch.put(fresh, ratio_log_prob=batch.log_prob[batch.places(fresh)])
    if len(of_engine):
        places = batch.places(of_engine)
        factor = truncated_weight(batch.log_prob[places], batch.old_log_prob[places], mismatch_cap)
        batch.put(of_engine, factor=factor)


def truncated_weight(trainer: Floats, engine: Floats, cap: float) -> Floats:
    """min(pi / mu, cap) from the log-probs of each token: truncated importance sampling.

    Args:
        trainer: [R] fp32 log-probs pi of the trainer.
        engine: [R] fp32 log-probs mu of the engine that sampled the tokens.
        cap: largest weight; it bounds the variance at the price of a bias.
    """
    return np.exp(np.minimum(trainer - engine, np.log(cap)), dtype=np.float32)


def build_minibatches(
    batch: StepBatch, count: int, rng: np.random.Generator, objective: ObjectiveConfig, max_tokens: int
) -> list[MiniBatch]:
    """Deal the groups that are trained on at random into `count` mini-batches of nearly equal size, whole.

    There are fewer mini-batches where groups are fewer. Rows that are not `learnt`, and those without an advantage
    where no other term has a gradient, only count in what losses are divided by.

    Args:
        batch: with advantages.
        count: optimiser steps.
        rng: advanced once, if there are groups.
        objective: its normalisation, and the coefficients of its terms without an advantage.
        max_tokens: L_max of the constant normalisation.
    """
    groups = len(batch.trained)
    if not groups:
        return []
    parts = np.array_split(rng.permutation(groups), min(count, groups))
    return [_minibatch(batch, batch.rows_of(batch.trained[part]), objective, max_tokens) for part in parts]


def _minibatch(batch: StepBatch, rows: Ints, objective: ObjectiveConfig, max_tokens: int) -> MiniBatch:
    written, advantage = batch.written[rows], batch.advantage[rows]
    tokens = int(written.sum())
    if objective.normalize == "constant":
        normalizer = len(rows) * max_tokens
    elif objective.normalize == "token":
        normalizer = tokens
    else:
        # The objective is positively homogeneous in the advantage, so 1/|o| may be put there.
        normalizer, advantage = len(rows), advantage / written
    for_all = objective.entropy_coef > 0 or objective.kl_coef > 0
    kept = batch.learnt[rows] & ((advantage != 0) | for_all)
    part = batch.take(rows[kept])
    part.fill(advantage=advantage[kept])
    return MiniBatch(rows[kept], part, float(normalizer), tokens, int(written[batch.fresh[rows]].sum()))
