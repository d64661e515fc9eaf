"""Scores of fresh answers under the policy before the update, only of the answers that need them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from exgrpo.train.common.step_batch import Floats, Ints, StepBatch
from exgrpo.train.config.options import Config
from exgrpo.train.policy.batch import MiniBatch
from exgrpo.train.policy.flops import Reading, together
from exgrpo.train.policy.policy import Policy

EXACT = 1e-4
"""Nats, of the mean difference up to which an engine knows the trainer's scores. A ratio is then wrong by 1e-4, a
two-thousandth of where it is clipped (0.2). Right fp32 paths differ by about sqrt(V) 2^-24, the rounding of a sum over
V tokens: 1.3e-5 for V = 49,152, 3.1e-5 for V = 262,144."""
SAMPLED = 1 / 32
"""Share of a step's answers that the trainer scores itself to find out, at least two."""
NONE = np.empty(0, np.int64)


class Scored(NamedTuple):
    """Fresh answers of a step whose scores are known.

    Attributes:
        rows: sorted numbers of the rows.
        read: tokens that the trainer read for them.
        sample: of an exact engine, the log-probs of the trainer and its own, of the tokens that both have scored; None:
            all rows are scored by the trainer.
    """

    rows: Ints = NONE
    read: tuple[Reading, ...] = ()
    sample: tuple[Floats, Floats] | None = None


class FreshScorer:
    """Takes scores from the cheapest source: the engine, the first optimiser step, or a pass of their own.

    They are the columns `log_prob` and `entropy` of a batch, and `old_log_prob` if that is the trainer's; NaN of rows
    that need none.

    Args:
        config: the run.
        policy: scores.
        settles: True if a function selects what is trained on after the answers are stored.
    """

    def __init__(self, config: Config, policy: Policy, *, settles: bool = False) -> None:
        self.policy = policy
        self.temperature = config.rollout.temperature
        self.same_arithmetic = config.policy.dtype == "fp32"
        self.by_trainer = config.rollout.behaviour == "trainer"
        self.own_forward = config.update_scores and not settles

    def by_engine(self, batch: StepBatch) -> Scored:
        """Take the scores of all fresh answers from an engine with the trainer's arithmetic, if it has it.

        Each step checks that on a sample of its answers.
        """
        fresh = np.flatnonzero(batch.fresh)
        at = batch.places(fresh)
        log_prob, entropy = batch.engine_log_prob[at], batch.engine_entropy[at]
        if not self.same_arithmetic or np.isnan(log_prob).any() or np.isnan(entropy).any():
            return Scored()
        rows = fresh[np.linspace(0, len(fresh) - 1, max(2, int(SAMPLED * len(fresh)))).round().astype(int)]
        part = batch.take(rows)
        trainer, engine = _both(part, self.policy.score(part, self.temperature).log_prob)
        if not np.abs(trainer - engine).mean() <= EXACT:
            return Scored()
        self._put(batch, fresh, log_prob, entropy)
        return Scored(fresh, tuple(together(part)), (trainer, engine))

    def by_a_pass(self, batch: StepBatch, rows: Ints, scored: Scored) -> Scored:
        """Score the rows whose scores are not known yet; no pass if there are none."""
        left = np.setdiff1d(rows, scored.rows)
        if not len(left):
            return scored
        part = batch.take(left)
        score = self.policy.score(part, self.temperature)
        self._put(batch, left, score.log_prob, score.entropy)
        return scored._replace(rows=np.union1d(scored.rows, left), read=(*scored.read, *together(part)))

    def scored_by_update(self, taught: Sequence[MiniBatch], scored: Scored) -> Ints:
        """Return the fresh rows that the first optimizer step will score; none if their scores are needed before."""
        if not taught or not self.own_forward or len(scored.rows):
            return NONE
        return taught[0].rows[taught[0].batch.fresh]

    def take_update_scores(self, batch: StepBatch, rows: Ints, scored: Scored) -> Scored:
        """Store the scores that the first optimizer step has computed for its fresh rows."""
        at = batch.places(rows)
        self._put(batch, rows, batch.log_prob[at], batch.entropy[at])
        return scored._replace(rows=np.union1d(scored.rows, rows))

    def _put(self, batch: StepBatch, rows: Ints, log_prob: Floats, entropy: Floats) -> None:
        batch.put(rows, log_prob=log_prob, entropy=entropy, **({"old_log_prob": log_prob} if self.by_trainer else {}))


def compared(batch: StepBatch, scored: Scored) -> tuple[Floats, Floats]:
    """Log-probs of trainer and engine, of the policy's tokens that both have scored."""
    if scored.sample or not len(scored.rows):
        return scored.sample or (np.empty(0, np.float32), np.empty(0, np.float32))
    part = batch.take(scored.rows)
    return _both(part, part.log_prob)


def _both(part: StepBatch, log_prob: Floats) -> tuple[Floats, Floats]:
    known = part.own & ~np.isnan(part.engine_log_prob)
    return log_prob[known], part.engine_log_prob[known]
