"""Scores of fresh answers under the policy before the update, computed no more often than they must be."""

from typing import NamedTuple

import numpy as np

from exgrpo.train.common.step_batch import Floats, Ints, StepBatch
from exgrpo.train.config.options import Config
from exgrpo.train.policy.flops import Reading, together
from exgrpo.train.policy.policy import Policy

EXACT = 1e-5
"""Nats. An engine whose log-probs are as near to the trainer's on average knows the trainer's scores: a
ratio is then wrong by a hundred thousandth, where it is clipped at a fifth."""
SAMPLED = 1 / 32
"""Share of a step's answers that the trainer scores itself to find out, at least two."""


class Scored(NamedTuple):
    """How the scores of a step's fresh answers became known.

    Attributes:
        known: whether they are; else the first optimiser step will know those of its rows.
        read: what the trainer has read for that.
        trainer: fp32 log-probs of the trainer, of the tokens that both it and the engine have scored.
        engine: those of the engine.
    """

    known: bool
    read: list[Reading]
    trainer: Floats
    engine: Floats


class FreshScorer:
    """Takes scores from where they are known: the engine, the first optimiser step, or a pass of their own.

    They are the columns `log_prob` and `entropy` of a batch; where the trainer is the writer, `old_log_prob`, too.

    Args:
        config: the run.
        policy: scores.
        all_trained: whether the update reads every fresh answer.
    """

    def __init__(self, config: Config, policy: Policy, *, all_trained: bool = True) -> None:
        self.policy = policy
        self.temperature = config.rollout.temperature
        self.same_arithmetic = config.policy.dtype == "fp32"
        self.by_trainer = config.rollout.behaviour == "trainer"
        # The first optimiser step sees the policy before it. Weights by the engine's log-probs, plans of steps ahead,
        # and a choice among the answers need the scores before.
        self.own_forward = (
            all_trained and config.objective.train_on == "all" and self.by_trainer and not config.rollout.ahead
        )

    def before(self, batch: StepBatch) -> Scored:
        """Scores before the update.

        An engine with the trainer's arithmetic has computed them in sampling. Whether it has is looked at in each step,
        on answers from all over the step.
        """
        fresh = np.flatnonzero(batch.fresh)
        at = batch.places(fresh)
        by_engine = batch.engine_log_prob[at], batch.engine_entropy[at]
        if self.same_arithmetic and not np.isnan(by_engine).any():
            places = np.linspace(0, len(fresh) - 1, max(2, int(SAMPLED * len(fresh)))).round().astype(int)
            part = batch.take(fresh[places])
            trainer, engine = _both(part, self.policy.score(part, self.temperature).log_prob)
            if np.abs(trainer - engine).mean() <= EXACT:
                self._put(batch, fresh, *by_engine)
                return Scored(True, together(part), trainer, engine)
        if self.own_forward:
            nothing = np.empty(0, np.float32)
            return Scored(False, [], nothing, nothing)
        return self._by_a_pass(batch, fresh)

    def beside(self, batch: StepBatch, told: Ints) -> list[Reading]:
        """Score the fresh answers that the first optimiser step will not tell, before it; what was read for that.

        Args:
            batch: of the step.
            told: the numbers of the rows in that optimiser step.
        """
        left = np.setdiff1d(np.flatnonzero(batch.fresh), told)
        return self._by_a_pass(batch, left).read if len(left) else []

    def after(self, batch: StepBatch, read: list[Reading]) -> Scored:
        """Scores that were not known before the update, once it has told its own; `read` is that of `beside`."""
        fresh = np.flatnonzero(batch.fresh)
        at = batch.places(fresh)
        self._put(batch, fresh, batch.log_prob[at], batch.entropy[at])
        return Scored(True, read, *_both(batch.take(fresh), batch.log_prob[at]))

    def _by_a_pass(self, batch: StepBatch, fresh: Ints) -> Scored:
        part = batch.take(fresh)
        score = self.policy.score(part, self.temperature)
        self._put(batch, fresh, score.log_prob, score.entropy)
        return Scored(True, together(part), *_both(part, score.log_prob))

    def _put(self, batch: StepBatch, fresh: Ints, log_prob: Floats, entropy: Floats) -> None:
        batch.put(fresh, log_prob=log_prob, entropy=entropy, **({"old_log_prob": log_prob} if self.by_trainer else {}))


def _both(part: StepBatch, log_prob: Floats) -> tuple[Floats, Floats]:
    """Log-probs of the trainer and of the engine, of the policy's tokens for which the engine gave one."""
    known = part.own & ~np.isnan(part.engine_log_prob)
    return log_prob[known], part.engine_log_prob[known]
