"""Scores of fresh answers under the policy before the update, no more than something needs, and the reference."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import deepspeed
import numpy as np

from exgrpo.train.common.records import Mask, Score
from exgrpo.train.common.step_batch import Floats, Ints, StepBatch
from exgrpo.train.config.options import Config
from exgrpo.train.policy.batch import MiniBatch, rows_of
from exgrpo.train.policy.engine import deepspeed_settings
from exgrpo.train.policy.flops import Reading, together
from exgrpo.train.policy.model import PolicyModel, compile_layers, load_model
from exgrpo.train.policy.policy import Policy
from exgrpo.train.policy.source import ModelSource
from exgrpo.train.policy.states import WEIGHT

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
        rows: their numbers, rising.
        read: what the trainer has read for that.
        by_update: numbers of those that the first update scores.
        sample: of an exact engine, the log-probs of the trainer and its own, of the tokens that both have scored; None:
            all rows are scored by the trainer.
    """

    rows: Ints = NONE
    read: tuple[Reading, ...] = ()
    by_update: Ints = NONE
    sample: tuple[Floats, Floats] | None = None


class FreshScorer:
    """Take scores from where they are known: the engine, the first optimiser step, or a pass of their own.

    They are the columns `log_prob` and `entropy` of a batch, and `old_log_prob` where the trainer's log-probs count as
    the writer's. Rows that nothing needs have NaN there.

    Args:
        config: the run.
        policy: scores.
        settles: rows are selected after the memory has stored the step, so that scores are needed before.
    """

    def __init__(self, config: Config, policy: Policy, *, settles: bool = False) -> None:
        self.policy = policy
        self.temperature = config.rollout.temperature
        self.same_arithmetic = config.policy.dtype == "fp32"
        self.by_trainer = config.rollout.behaviour == "trainer"
        self.own_forward = config.update_scores and not settles

    def by_engine(self, batch: StepBatch) -> Scored:
        """Take over the engine's scores of all fresh rows if they agree with the trainer's on a sample of the step.

        Rows with tokens of an earlier policy have none of the present one.
        """
        fresh = np.flatnonzero(batch.fresh & (batch.sums(batch.column("staleness")) == 0))
        at = batch.places(fresh)
        log_prob, entropy = batch.engine_log_prob[at], batch.engine_entropy[at]
        if not len(fresh) or not self.same_arithmetic or np.isnan(log_prob).any() or np.isnan(entropy).any():
            return Scored()
        rows = fresh[np.linspace(0, len(fresh) - 1, max(2, int(SAMPLED * len(fresh)))).round().astype(int)]
        part = batch.take(rows)
        trainer, engine = _both(part, self.policy.score(part, self.temperature).log_prob)
        if not np.abs(trainer - engine).mean() <= EXACT:
            return Scored()
        self._put(batch, fresh, log_prob, entropy)
        return Scored(fresh, tuple(together(part)), sample=(trainer, engine))

    def by_passes(
        self, batch: StepBatch, scored: Scored, stored: Mask | None, with_signal: Sequence[MiniBatch] = ()
    ) -> Scored:
        """Score the fresh rows that the memory or an update needs, except those that the first update will score.

        Args:
            batch: the step.
            scored: known so far.
            stored: [N] rows that the memory stores; None: a function of the method reads the scores of all fresh rows.
            with_signal: mini-batches of the updates.
        """
        wanted = batch.fresh if stored is None else stored & self.by_trainer  # the engine has scored its own
        trained = rows_of(with_signal)
        by_update = NONE
        if with_signal and self.own_forward and not len(scored.rows):
            by_update = with_signal[0].rows[with_signal[0].batch.fresh]
        needed = np.union1d(np.flatnonzero(wanted), trained[batch.fresh[trained]])
        rows = np.setdiff1d(needed, np.union1d(scored.rows, by_update))
        if len(rows):
            part = batch.take(rows)
            score = self.policy.score(part, self.temperature)
            self._put(batch, rows, score.log_prob, score.entropy)
            scored = scored._replace(rows=np.union1d(scored.rows, rows), read=(*scored.read, *together(part)))
        return scored._replace(by_update=by_update)

    def by_update(self, batch: StepBatch, scored: Scored) -> Scored:
        """Take over the scores that the first update has computed."""
        rows = scored.by_update
        if not len(rows):
            return scored
        at = batch.places(rows)
        self._put(batch, rows, batch.log_prob[at], batch.entropy[at])
        return scored._replace(rows=np.union1d(scored.rows, rows), by_update=NONE)

    def _put(self, batch: StepBatch, rows: Ints, log_prob: Floats, entropy: Floats) -> None:
        batch.put(rows, log_prob=log_prob, entropy=entropy, **({"old_log_prob": log_prob} if self.by_trainer else {}))


def compared(batch: StepBatch, scored: Scored) -> tuple[Floats, Floats]:
    """Return log-probs of the trainer and of the engine, of the policy's tokens that both have scored."""
    if scored.sample or not len(scored.rows):
        return scored.sample or (np.empty(0, np.float32), np.empty(0, np.float32))
    part = batch.take(scored.rows)
    return _both(part, part.log_prob)


def _both(part: StepBatch, log_prob: Floats) -> tuple[Floats, Floats]:
    known = part.response_mask & ~np.isnan(part.engine_log_prob) & (part.column("staleness") == 0)
    return log_prob[known], part.engine_log_prob[known]


class KeptWeights:
    """The trained weights as they are now, to score with later: with adapters, the reference is the model of the start.

    Attributes:
        weights: [n] fp32 by name, of the part of each that is here; while they are in use, the trained ones.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.weights = {name: policy.states.get(name, WEIGHT).clone() for name in policy.states.parameters}

    def score(self, batch: StepBatch) -> Score:
        """Score by the weights of the reference. If that fails they stay in use: the run is over."""
        self._exchange()
        score = self.policy.score(batch, self.policy.temperature)
        self._exchange()
        return score

    def _exchange(self) -> None:
        states = self.policy.states
        for name, kept in self.weights.items():
            present = states.get(name, WEIGHT).clone()
            states.set(name, WEIGHT, kept)
            kept.copy_(present)
        states.apply()


class Reference:
    """Frozen model of the divergence; fills its log-probs in.

    Args:
        score: rows under the reference, at the rollout temperature; all ranks call it together.
    """

    def __init__(self, score: Callable[[StepBatch], Score]) -> None:
        self.score = score

    def fill(self, batch: StepBatch, *, replayed: bool = False) -> Ints:
        """Put `reference_log_prob` for the trained rows inside `loss_mask`; return their numbers.

        Args:
            batch: the step.
            replayed: whether replayed rows are compared, too.
        """
        rows = batch.rows_of(batch.trained)
        rows = rows[(batch.fresh[rows] | replayed) & batch.loss_mask[rows]]
        batch.put(rows, reference_log_prob=self.score(batch.take(rows)).log_prob)
        return rows


def make_reference(config: Config, source: ModelSource, policy: Policy) -> Reference | None:
    """The reference of a run whose objective has one: the model of the source, of which the policy is trained."""
    if not config.objective.compared:
        return None
    if config.lora.rank:
        return Reference(KeptWeights(policy).score)
    model, options = load_model(config, source), config.policy
    frozen = PolicyModel(model, options.kernel_backend, options.kernel_memory).requires_grad_(False)
    if policy.world.size == 1:
        if policy.compiled:  # where the policy has not moved, the divergence is 0
            compile_layers(model)
        engine = frozen.to(policy.world.device)
    else:
        engine, *_ = deepspeed.initialize(model=frozen, config=deepspeed_settings(config), dist_init_required=False)
    return Reference(lambda batch: policy.score_with(engine, batch, policy.temperature))
