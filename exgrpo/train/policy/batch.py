"""From a graded batch to mini-batches of rows with advantages, and the tensors of micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from exgrpo.train.common.records import Mask
from exgrpo.train.common.step_batch import Floats, Ints, StepBatch
from exgrpo.train.config.objective import ObjectiveConfig
from exgrpo.train.policy.segments import Segments
from exgrpo.train.replay.contract import PRESENT

IGNORED = -100


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """Rows of one optimiser step over all ranks, and the divisor of their losses.

    Attributes:
        rows: [n] numbers in the step's batch of the rows that can carry a gradient.
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
    def all_rows(self) -> bool:
        """True if rows without an advantage have a gradient, too."""
        return self.batch.has("weight")

    @property
    def has_signal(self) -> bool:
        """True if any row has an advantage; NaN counts, so that it is noticed."""
        return bool(((self.batch.advantage != 0) | self.all_rows).any())

    def couple(self, log_prob: Floats, beta2: float, among: Mask) -> None:
        """Subtract from each advantage the mean of A - beta2 S over its group, with S the log-ratio of an answer.

        A regression of S on these advantages compares the answers of a group, whatever the baseline is.

        Args:
            log_prob: [T] of the policy before this update.
            beta2: coefficient of S.
            among: [n] rows of the regression; others stay as they are.
        """
        batch, reference = self.batch, self.batch.ratio_log_prob
        moved = np.subtract(log_prob, reference, out=np.zeros_like(log_prob), where=reference != PRESENT)
        rest = batch.mean(batch.advantage - beta2 * batch.sums(moved), among)[batch.group]
        batch.fill(advantage=batch.advantage - np.where(among, rest, 0))

    def refer_to(self, batch: StepBatch | None, *, ratio_to_start: bool = False) -> None:
        """Set `ratio_log_prob` and `factor` of fresh rows.

        Args:
            batch: the step, with the `log_prob` that ratios refer to; None: the update itself computes them.
            ratio_to_start: ratios of rows that are compared with the reference refer to it instead.
        """
        fresh = np.flatnonzero(self.batch.fresh)
        if batch is None:
            self.batch.put(fresh, ratio_log_prob=np.full(self.batch.length[fresh].sum(), PRESENT))
        elif len(fresh):
            places = batch.places(self.rows[fresh])
            self.batch.put(fresh, ratio_log_prob=batch.log_prob[places])
            if batch.has("factor"):
                self.batch.put(fresh, factor=batch.factor[places])
        if ratio_to_start:
            reference = self.batch.reference_log_prob
            self.batch.fill(ratio_log_prob=np.where(np.isnan(reference), self.batch.ratio_log_prob, reference))


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Tensors of one forward pass; `layout` makes them.

    Padded, B rows of at most L tokens: position t predicts the token at t + 1. Packed, N tokens without padding, which
    predict the T response tokens.

    Attributes:
        tokens: [B, L] or [1, N] int64 input ids.
        target: [B, L] or [T] int64, the response token that is predicted, -100 for none: pads and observations.
        targets: number of targets.
        segments: rows of packed tokens; None: the batch is padded.
        allowed_tokens: ids [M] int32 and offsets [targets' places + 1] int64, as `exgrpo.kernels` takes them; None:
            the whole vocabulary.
    """

    tokens: torch.Tensor
    target: torch.Tensor
    targets: int
    segments: Segments | None = field(default=None, kw_only=True)
    allowed_tokens: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, kw_only=True)


@dataclass(frozen=True, eq=False)
class MicroBatch(TokenBatch):
    """Tensors of one forward pass with a loss, 0 at pads.

    Attributes:
        old_log_prob: fp32, shaped like the target, of the policy that ratios refer to.
        advantage: fp32, shaped like the target.
        replayed: bool, shaped like the target.
        lengths: [N] int64, targets of each row, in their order.
        active: number of targets with an advantage other than 0.
        weight: fp32, shaped like the target, weight of each token's answer; None: it is in the advantages.
        reference_log_prob: fp32, shaped like the target; None: there is no reference.
    """

    old_log_prob: torch.Tensor
    advantage: torch.Tensor
    replayed: torch.Tensor
    lengths: torch.Tensor
    active: int
    weight: torch.Tensor | None = field(default=None, kw_only=True)
    reference_log_prob: torch.Tensor | None = field(default=None, kw_only=True)


def rows_of(minibatches: Sequence[MiniBatch]) -> Ints:
    """Return the rows of some mini-batches, one after the other."""
    return np.concatenate([np.empty(0, np.int64), *(one.rows for one in minibatches)])


def build_minibatches(
    batch: StepBatch,
    count: int,
    rng: np.random.Generator,
    objective: ObjectiveConfig,
    max_tokens: int,
    *,
    all_rows: bool = False,
) -> list[MiniBatch]:
    """Deal whole groups that are trained on at random into `count` mini-batches of nearly equal size.

    There are fewer mini-batches where groups are fewer. Rows outside `loss_mask`, and those without an advantage
    where no other term has a gradient, only count in what losses are divided by.

    Args:
        batch: with advantages.
        count: optimiser steps.
        rng: advanced once, if there are groups.
        objective: its normalisation, and the coefficients of its terms without an advantage.
        max_tokens: L_max of the constant normalisation.
        all_rows: rows without an advantage have a gradient, too. The objective is not homogeneous in the advantage
            then, and mini-batches have a `weight`.
    """
    groups = len(batch.trained)
    if not groups:
        return []
    parts = np.array_split(rng.permutation(groups), min(count, groups))
    return [_minibatch(batch, batch.rows_of(batch.trained[part]), objective, max_tokens, all_rows) for part in parts]


def _minibatch(batch: StepBatch, rows: Ints, objective: ObjectiveConfig, max_tokens: int, all_rows: bool) -> MiniBatch:
    length, advantage, weight = batch.num_tokens[rows], batch.advantage[rows], np.ones(len(rows))
    tokens = int(length.sum())
    if objective.normalize == "constant":
        normalizer = len(rows) * max_tokens
    elif objective.normalize == "token":
        normalizer = tokens
    else:
        normalizer = len(rows)
    if objective.normalize == "sequence" and all_rows:
        weight /= length
    elif objective.normalize == "sequence":
        # The objective is positively homogeneous in the advantage, so 1/|o| may be put there.
        advantage = advantage / length
    for_all = objective.entropy_coef > 0 or objective.kl_coef > 0 or all_rows
    kept = batch.loss_mask[rows] & ((advantage != 0) | for_all)
    part = batch.take(rows[kept])
    part.fill(advantage=advantage[kept], **({"weight": weight[kept]} if all_rows else {}))
    return MiniBatch(rows[kept], part, float(normalizer), tokens, int(length[batch.fresh[rows]].sum()))
