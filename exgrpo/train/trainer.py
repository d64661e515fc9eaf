"""The training loop (arXiv 2510.02245, algorithm 1), readable from top to bottom."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from exgrpo.train.common.functions import Needs
from exgrpo.train.common.records import Rollout, Score
from exgrpo.train.common.seeds import derive_seed, generator
from exgrpo.train.common.step_batch import LOG_PROB_SOURCES, Ints, StepBatch
from exgrpo.train.config.objective import SURROGATES, overlong_penalty
from exgrpo.train.config.options import Config
from exgrpo.train.data.questions import QuestionSet
from exgrpo.train.metrics.soundness import IdleSteps, overflowed
from exgrpo.train.metrics.step import step_metrics
from exgrpo.train.metrics.utilisation import PhaseClock
from exgrpo.train.policy.batch import MiniBatch, build_minibatches, rows_of
from exgrpo.train.policy.correction import correct
from exgrpo.train.policy.flops import Reading, Work, together
from exgrpo.train.policy.policy import Policy
from exgrpo.train.policy.scores import NONE, FreshScorer, Reference, Scored
from exgrpo.train.policy.update import UpdateStats
from exgrpo.train.replay import (
    MeanScores,
    Mixture,
    PlannedGroup,
    Replay,
    ReplayState,
    numbers_of,
    planned_from,
    replay_metrics,
)
from exgrpo.train.replay.groups import fill_advantages
from exgrpo.train.replay.rules import ImportanceWeighting
from exgrpo.train.rollout.answers import Produced, RolloutWorker
from exgrpo.train.rollout.engine import Sampling
from exgrpo.train.rollout.partial import PartialRollouts, Underway
from exgrpo.train.rollout.stops import Stops


@dataclass(frozen=True, eq=False)
class StepResult:
    """Result of one training step.

    Attributes:
        metrics: plain numbers by name, as written to metrics.jsonl.
        batch: all answers of the step; groups of stored answers alone come last.
        work: prompts and responses that the model read and wrote, by phase.
        notes: sentences for the user.
        applied: for each optimiser step, True if it was taken: its gradient was finite.
    """

    metrics: dict[str, float]
    batch: StepBatch
    work: Work
    notes: tuple[str, ...] = ()
    applied: tuple[bool, ...] = ()


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """Groups of a step, and its answers if they are generated while the step before updates.

    Attributes:
        whole: of partial rollouts, the first groups, whose answers are written.
    """

    groups: list[PlannedGroup]
    produced: Future[Produced] | None = None
    whole: Sequence[Underway] = ()


class Trainer:
    """The state of a run between steps, and the step.

    Every rank holds the same replay and generators and takes the same decisions from the same data; only generation,
    grading and the passes through the model are shared out.

    Args:
        config: the run.
        questions: questions to train on.
        policy: the model and its optimiser.
        rollout_worker: generates and grades.
        reference: frozen model of the divergence, if the objective has one.
    """

    def __init__(
        self,
        config: Config,
        questions: QuestionSet,
        policy: Policy,
        rollout_worker: RolloutWorker,
        reference: Reference | None = None,
    ) -> None:
        self.config = config
        self.questions = questions.questions
        weights = config.data.train_weights
        self.policy = policy
        self.reference = reference
        self.rollout_worker = rollout_worker
        self.sampling = Sampling(
            max_tokens=config.rollout.max_tokens,
            temperature=config.rollout.temperature,
            log_prob=config.rollout.behaviour == "engine" or rollout_worker.engine.free_log_prob,
            stop=Stops(config.rollout.stop, rollout_worker.decode),
            **config.rollout.cut,
        )
        self.partial: PartialRollouts | None = None
        if config.rollout.partial:
            questions_of = self.questions.__getitem__
            self.partial = PartialRollouts(config.rollout, rollout_worker, questions_of, self.sampling)
        mixture = Mixture(questions.sizes, weights) if weights else None
        self.replay = Replay(
            config.method,
            len(self.questions),
            config.seed,
            success_option="reward.success",
            mixture=mixture,
            prompt=lambda question: self.questions[question].prompt_ids,
        )
        self.stores_early = self.replay.settles or config.rollout.ahead
        """Rows are selected from what is stored, or the next step is planned before the update."""
        self.needs = Needs.of(SURROGATES.find(config.objective.surrogate))
        self.ratio_to_start = config.objective.anchor == "start"
        self.importance_weighting = ImportanceWeighting.from_config(
            config, lambda rows: self.replay.rescored(rows, self._score(rows, self.sampling.temperature).log_prob)
        )
        self.scorer = FreshScorer(config, policy, settles=self.replay.settles)
        self.batch_rng = generator(config.seed, "mini-batches")
        self.idle = IdleSteps()
        self.skipped_updates = 0
        self.generated_tokens = 0
        self._next: PlannedStep | None = None
        self._read: list[Reading] = []
        self._background = ThreadPoolExecutor(1, "rollouts")

    def step(self, step: int) -> StepResult | None:
        """Run one training step; return None if every question is retired and no answer is left to learn from."""
        clock, self._read = PhaseClock(), []
        planned = self._plan(step, clock)
        if not planned.groups:
            return None
        with clock("select"):
            replayed = self.replay.select(planned.groups, self._mean_scores)
        with clock("rollout"):
            batch = self._generate(planned, replayed, step)
        admitted = None if self.replay.needs_scores else self.replay.admitted(batch)
        with clock("score"):
            scored = self.scorer.by_engine(batch)
            if self.stores_early:
                scored = self.scorer.by_passes(batch, scored, admitted)
        if self.stores_early:
            report = self.replay.store(batch, step, admitted)
        with clock("select"):
            refilled = self.config.rollout.refills > 0
            batch = self.replay.settle(batch, self.config.questions, step, refilled=refilled)
            self._fill_loss_columns(batch)
        with clock("score"):
            compared = self._compare(batch)
        minibatches = self._minibatches(batch)
        with_signal = [one for one in minibatches if one.has_signal]
        with clock("score"):
            scored = self.scorer.by_passes(batch, scored, admitted, with_signal)
        correction = correct(batch, rows_of(with_signal), self.config.rollout)
        ages = self.partial.metrics(batch) if self.partial else {"staleness": float(planned.produced is not None)}
        self._next = self._begin_next(step + 1)
        with clock("update"):
            updates = self._update(batch, with_signal, keep_scores=len(scored.by_update) > 0)
        scored = self.scorer.by_update(batch, scored)
        if not self.stores_early:
            report = self.replay.store(batch, step, admitted)
        self._push_weights(clock)
        self.generated_tokens += int(batch.num_tokens[batch.fresh].sum())
        experience = {"pass_rate": report.pass_rate, **replay_metrics(self.replay, batch, step)}
        work = self._work(batch, scored, compared, with_signal)
        numbers = step_metrics(batch, self.questions, minibatches, updates, scored, clock.seconds, work)
        metrics = {"step": step, **numbers, **experience, **correction, **ages, **self._counters()}
        notes = (report.note, self.idle.observe(batch, minibatches), overflowed(updates))
        return StepResult(metrics, batch, work, tuple(filter(None, notes)), tuple(one.applied for one in updates))

    def _plan(self, step: int, clock: PhaseClock) -> PlannedStep:
        """Return the groups of a step: of partial rollouts, those that are whole first."""
        with clock("select"):
            planned = self._next or PlannedStep(self.replay.plan(self.config.questions, step))
        if self.partial and planned.groups:
            with clock("rollout"):
                return self._advance(planned.groups, self.partial, step)
        return planned

    def _generate(self, planned: PlannedStep, replayed: StepBatch, step: int) -> StepBatch:
        """Return the graded answers of the planned groups, and those of refills while too few have a gradient."""
        written = [[one for one in group.answers if one] for group in planned.whole] if self.partial else None
        produced = planned.produced.result() if planned.produced else self._produce(planned.groups, step, written)
        batch = self._graded(planned.groups, produced, step)
        if self.partial:
            written_in = [steps for one in planned.whole for steps in one.steps]
            batch.fill(staleness=step - np.concatenate([np.empty(0, np.int64), *written_in]))
        batch = batch.append_rows(replayed)
        for _ in range(self.config.rollout.refills):
            more = self.replay.refill(batch, self.config.questions, step)
            if not more:
                break
            batch = batch.append_groups(self._graded(more, self._produce(more, step), step))
        return batch

    def _graded(self, groups: Sequence[PlannedGroup], produced: Produced, step: int) -> StepBatch:
        batch, rollout = self.rollout_worker.join(produced), self.config.rollout
        penalty = [overlong_penalty(n, rollout.max_tokens, self.config.objective) for n in batch.length.tolist()]
        of_rows = {"step": step, "old_log_probs_from": LOG_PROB_SOURCES.index(rollout.behaviour)}
        given = np.repeat([group.given for group in groups], [group.fresh for group in groups])
        batch.fill(penalty=penalty, given=given, **{name: np.full(len(batch), one) for name, one in of_rows.items()})
        if rollout.behaviour == "engine":
            batch.fill(old_log_prob=batch.engine_log_prob)
        return batch

    def _fill_loss_columns(self, batch: StepBatch) -> None:
        """Fill advantages, the terms of replayed rows and `loss_mask`.

        A step on one band of difficulty is the part of a whole step that this band contributes, not a smaller batch.
        """
        objective = self.config.objective
        fill_advantages(batch, objective)
        self.importance_weighting(batch)
        in_band = self.replay.in_band(batch, objective.train_on)[batch.group]
        batch.fill(loss_mask=in_band & (batch.finished | (not objective.overlong_filter)))

    def _compare(self, batch: StepBatch) -> Ints:
        """Fill the log-probs of the reference, if there is one; return the rows that are compared with it."""
        replayed = self.ratio_to_start and self.importance_weighting.term == "clipped"
        return self.reference.fill(batch, replayed=replayed) if self.reference else NONE

    def _mean_scores(self, candidates: StepBatch) -> MeanScores:
        # At temperature 1 and over the whole vocabulary, however the answers were sampled.
        return MeanScores.from_scores(candidates, self._score(candidates.without("allowed_tokens"), 1.0))

    def _score(self, batch: StepBatch, temperature: float) -> Score:
        self._read += together(batch)
        return self.policy.score(batch, temperature)

    def _advance(self, groups: Sequence[PlannedGroup], partial: PartialRollouts, step: int) -> PlannedStep:
        """Return groups of partial rollouts that are whole, as many as are planned, and planned ones without any."""
        whole = partial.advance(
            [group for group in groups if group.fresh],
            lambda wanted, without: self.replay.more(wanted, step, without),
            step,
            derive_seed(self.config.seed, "rollouts", step),
        )
        return PlannedStep(
            [*(one.group for one in whole), *(group for group in groups if not group.fresh)], whole=whole
        )

    def _produce(
        self, groups: Sequence[PlannedGroup], step: int, written: Sequence[Sequence[Rollout]] | None = None
    ) -> Produced:
        return self.rollout_worker.produce(
            [self.questions[group.question] for group in groups],
            [group.fresh for group in groups],
            self.sampling,
            derive_seed(self.config.seed, "rollouts", step),
            written,
            [group.prefix for group in groups],
        )

    def _begin_next(self, step: int) -> PlannedStep | None:
        """Start to generate for a step with the policy before the present step's update, if rollouts run ahead.

        The plan depends only on what is stored by now; which answer is replayed is decided later.
        """
        if not self.config.rollout.ahead or step > self.config.steps:
            return None
        groups = self.replay.plan(self.config.questions, step)
        return PlannedStep(groups, self._background.submit(self._produce, groups, step))

    def _minibatches(self, batch: StepBatch) -> list[MiniBatch]:
        objective, optimizer, max_tokens = self.config.objective, self.config.optimizer, self.config.rollout.max_tokens
        count, all_rows = optimizer.minibatches, self.needs.all_rows
        return [
            minibatch
            for _ in range(optimizer.passes)
            for minibatch in build_minibatches(batch, count, self.batch_rng, objective, max_tokens, all_rows=all_rows)
        ]

    def _update(self, batch: StepBatch, with_signal: Sequence[MiniBatch], *, keep_scores: bool) -> list[UpdateStats]:
        """Make one optimiser step for each mini-batch; with `keep_scores`, the first one scores its rows in the batch.

        Mini-batches without an advantage are left out: they have only an entropy bonus, of which AdamW would make a
        full step, however small its gradient is.
        """
        term = self.importance_weighting.term
        replays = bool(batch.replayed[batch.rows_of(batch.trained)].any())
        clip = self.config.objective.clip_with_replay or term == "clipped" or not replays
        updates: list[UpdateStats] = []
        for minibatch in with_signal:
            asked = keep_scores and not updates
            renews = self.replay.renews and bool(minibatch.batch.replayed.any())
            minibatch.refer_to(None if asked else batch, ratio_to_start=self.ratio_to_start)
            if self.needs.coupled:
                rows = minibatch.batch
                moved = updates or self.ratio_to_start or rows.replayed.any()
                now = self.policy.score(rows, self.sampling.temperature).log_prob if moved else rows.ratio_log_prob
                minibatch.couple(now, self.config.objective.beta2, rows.fresh | (term == "clipped"))
            update = self.policy.update(minibatch, clip=clip, term=term, keep_scores=asked or renews)
            if update.scores and renews:
                self.replay.rescored(minibatch.batch, update.scores.log_prob)
            if update.scores and asked:
                batch.put(minibatch.rows, log_prob=update.scores.log_prob, entropy=update.scores.entropy)
            updates.append(update)
        self.skipped_updates += sum(not update.applied for update in updates)
        return updates

    def _push_weights(self, clock: PhaseClock) -> None:
        with clock("rollout"):
            if self._next and self._next.produced:
                self._next.produced.exception()  # the engine takes no weights while it generates
        with clock("push"):
            self.rollout_worker.engine.push_weights(self.policy.weights())

    def _work(self, batch: StepBatch, scored: Scored, compared: Ints, with_signal: Sequence[MiniBatch]) -> Work:
        return {
            "select": self._read,
            "generate": together(batch, np.flatnonzero(batch.fresh)),
            "score": [*scored.read, *together(batch, compared)],
            "update": [reading for one in with_signal for reading in together(batch, one.rows)],
        }

    def _counters(self) -> dict[str, float]:
        return {
            "learning_rate": self.policy.learning_rate,
            "skipped_updates": self.skipped_updates,
            "generated_tokens": self.generated_tokens,
        }

    def state(self) -> ReplayState:
        """Return the state between two steps, besides the policy.

        It is the state of the replay, with the trainer's own counters, generator and plan among the values.
        """
        replay = self.replay.state()
        generators = {**replay.values["generators"], "batch": self.batch_rng.bit_generator.state}
        # Answers that were generated ahead are generated again: by then the policy is a newer one.
        ahead = self._next and numbers_of(self._next.groups, self.replay.memory.table.rows())
        own = {"skipped_updates": self.skipped_updates, "generated_tokens": self.generated_tokens, "ahead": ahead}
        underway, arrays = self.partial.state() if self.partial else ([], {})
        own |= {"underway": underway} if self.partial else {}
        return ReplayState({**replay.values, **own, "generators": generators}, {**replay.arrays, **arrays})

    def restore(self, state: ReplayState) -> None:
        """Continue from a state of a trainer with the same configuration and questions."""
        self.replay.restore(state)
        values = state.values
        self.skipped_updates, self.generated_tokens = values["skipped_updates"], values["generated_tokens"]
        self.batch_rng.bit_generator.state = values["generators"]["batch"]
        if values["ahead"]:
            self._next = PlannedStep(planned_from(values["ahead"]))
        if self.partial:
            self.partial.restore(values["underway"], state.arrays)
