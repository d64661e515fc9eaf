"""Warn about consecutive steps without a learning signal or update, and stop runs that fail for long."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from exgrpo.train.common.records import Counts, Failure
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.policy.batch import MiniBatch
from exgrpo.train.policy.update import UpdateStats

FIRST_WARNING = 4
FAILING_STEPS = 3
SKIPPED_WARNING, SKIPPED_MOST = 3, 10


@dataclass(eq=False)
class IdleSteps:
    """Counts consecutive training steps without any advantage, and explains them."""

    in_a_row: int = 0

    def observe(self, batch: StepBatch, minibatches: Sequence[MiniBatch]) -> str | None:
        """Return a warning after 4, 8, 16, ... consecutive steps in which no mini-batch had an advantage."""
        idle = len(minibatches) > 0 and not any(one.has_signal for one in minibatches)
        self.in_a_row = self.in_a_row + 1 if idle else 0
        if self.in_a_row < FIRST_WARNING or self.in_a_row & (self.in_a_row - 1):
            return None
        rewards = [set(batch.net_reward[batch.rows_of([group])].tolist()) for group in batch.trained]
        differing = sum(len(of_group) > 1 for of_group in rewards)
        if differing:
            why = (
                f"{differing} of {len(rewards)} groups have rewards that differ, and objective.train_on or "
                "objective.overlong_filter leaves them out"
            )
        else:
            values = sorted({value for of_group in rewards for value in of_group})
            span = f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"
            why = (
                f"in each of the {len(rewards)} groups all answers have the same reward ({span}): the questions are "
                "all too hard or all too easy, or the reward does not recognise the answers (see samples.jsonl)"
            )
        return f"the last {self.in_a_row} steps changed nothing, for no answer has an advantage: {why}"


@dataclass(eq=False)
class Soundness:
    """Counts consecutive training steps with more than `max_failed` failed grades, and skipped optimizer steps."""

    max_failed: float
    failing: int = 0
    skipped: int = 0

    def observe(self, counts: Counts, applied: Sequence[bool]) -> str | None:
        """Count a training step and its optimizer steps, of which some were skipped; return a warning, if any."""
        self.failing = self.failing + 1 if counts.failed_fraction > self.max_failed else 0
        warn = False
        for taken in applied:
            self.skipped = 0 if taken else self.skipped + 1
            warn |= self.skipped == SKIPPED_WARNING
        if not warn:
            return None
        return (
            f"{SKIPPED_WARNING} optimiser steps in a row were skipped, because their gradient is not finite. "
            f"After {SKIPPED_MOST} the run stops"
        )

    def problem(self, counts: Counts) -> str | None:
        """Return why the run must stop after the observed step, and the remedy; None: it need not."""
        if self.failing >= FAILING_STEPS:
            return (
                f"in each of the last {self.failing} steps more than {self.max_failed:.0%} of the answers could not be "
                f"graded, {counts.failed_fraction:.0%} in the last one: {ungraded(counts)}"
            )
        if self.skipped >= SKIPPED_MOST:
            return (
                f"the last {self.skipped} optimiser steps were skipped, because their gradient is not finite: the run "
                "learns nothing. Look for NaN in functions of your own, as objective.surrogate, lower optimizer.lr, or "
                "take policy.dtype bf16 where it is fp16"
            )
        return None


def overflowed(updates: Sequence[UpdateStats]) -> str | None:
    """Return a message if a gradient of a training step overflowed at the loss scale of fp16."""
    scales = [f"{one.loss_scale:.0f}" for one in updates if not one.applied and math.isfinite(one.loss_scale)]
    if not scales:
        return None
    steps = "an optimiser step was" if len(scales) == 1 else f"{len(scales)} optimiser steps were"
    return (
        f"{steps} skipped, because the gradient is beyond the range of fp16 at a loss scale of {', '.join(scales)}; "
        "the next one has half of it"
    )


def ungraded(counts: Counts) -> str:
    """Return the most frequent cause of failed grading, of at least one, and the remedy."""
    first = max(counts.failures, key=lambda one: one.count)
    return f"reward {first.reward!r}: {first.cause}. {remedy(first)}, or tolerate more by --reward.max_failed"


def remedy(failure: Failure) -> str:
    """Return the remedy for a failing reward."""
    if "reward.time_limit" in failure.cause:
        return "Make the function faster, or raise --reward.time_limit"
    return "Fix the function"
