"""The training loop (arXiv 2510.02245, algorithm 1), readable from top to bottom."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np

from exgrpo.train.answers import Answer, Answerer, Produced
from exgrpo.train.config import Config
from exgrpo.train.data.questions import QuestionSet
from exgrpo.train.experience import (
    MeanScore,
    Mixture,
    PlannedGroup,
    Replay,
    ReplayState,
    Selected,
    in_band,
    numbers_of,
    planned_from,
)
from exgrpo.train.experience.weighing import Weighed
from exgrpo.train.metrics.clock import PhaseClock
from exgrpo.train.metrics.soundness import IdleSteps
from exgrpo.train.metrics.step import OptimiserSteps, StepRecord, step_metrics
from exgrpo.train.metrics.work import Reading, Work, together
from exgrpo.train.objective.overlong import overlong_penalty
from exgrpo.train.policy.batch import TokenSequence, TrainingRow, advantages, build_minibatches, build_rows
from exgrpo.train.policy.reference import Reference
from exgrpo.train.policy.zero3 import Policy
from exgrpo.train.records import Group, Score, TokenIds, Trajectory
from exgrpo.train.replayed import Weigher
from exgrpo.train.reward.success import EPSILON
from exgrpo.train.rollout import Sampling, Stops
from exgrpo.train.scores import FreshScorer, FreshScores
from exgrpo.train.seeds import derive_seed, generator
from exgrpo.train.steps import Asked, PlannedStep, StepResult


class Trainer:
    """The state of a run between steps, and the step.

    Every rank holds the same replay and generators and takes the same decisions from the same data; only generation,
    grading and the passes through the model are shared out.

    Args:
        config: the run.
        questions: what to train on.
        policy: the model and its optimiser.
        answerer: generates and grades.
        reference: what a divergence refers to, if the objective has one.
    """

    def __init__(
        self,
        config: Config,
        questions: QuestionSet,
        policy: Policy,
        answerer: Answerer,
        reference: Reference | None = None,
    ) -> None:
        self.config = config
        self.questions = questions.questions
        weights = config.data.train_weights
        self.policy = policy
        self.reference = reference
        self.answerer = answerer
        self.sampling = Sampling(
            max_tokens=config.rollout.max_tokens,
            temperature=config.rollout.temperature,
            log_prob=config.rollout.behaviour == "engine" or answerer.engine.free_log_prob,
            stop=Stops(config.rollout.stop, answerer.decode),
        )
        self.replay = Replay(
            config.experience,
            len(self.questions),
            config.rollout.samples,
            config.seed,
            success=config.reward.success,
            success_option="reward.success",
            scale_by_std=config.objective.scale_by_std,
            leave_one_out=config.objective.baseline == "leave_one_out",
            mixture=Mixture(questions.sizes, weights) if weights else None,
        )
        self.weigher = Weigher.of_run(config, lambda rows: self._score(rows, self.sampling.temperature))
        all_trained = not (self.replay.settles or config.rollout.refills)
        self.scorer = FreshScorer(config, policy, all_trained=all_trained)
        self.batch_rng = generator(config.seed, "mini-batches")
        self.idle = IdleSteps()
        self.skipped_updates = 0
        self.generated_tokens = 0
        self._next: PlannedStep | None = None
        self._compared: list[Reading] = []
        self._background = ThreadPoolExecutor(1, "rollouts")

    def step(self, step: int) -> StepResult | None:
        """One training step; None where every question is retired and nothing is left to learn from."""
        clock = PhaseClock()
        self._compared = []
        with clock("select"):
            planned = self._next or PlannedStep(self.replay.plan(self.config.questions, step))
            joined = self.replay.select(planned.groups, self._mean_scores)
        if not planned.groups:
            return None
        with clock("rollout"):
            asked = self._ask(planned, joined, step)
        rollouts, sequences = asked.answers.rollouts, self._sequences(asked)
        with clock("score"):
            fresh = self.scorer.before(sequences, rollouts)
        groups = self._groups(asked, fresh.scores, step)
        if fresh.known:
            taken_in = self.replay.take_in(groups, step)
        with clock("select"):
            trained, late = self._settle(groups, step)
            of_groups, replayed = self._weigh(trained)
        with clock("score"):
            rows = self._rows(trained, of_groups, replayed)
        self._next = self._begin_next(step + 1)
        with clock("update"):
            optimised = self._update(rows, replays=bool(replayed), keep_scores=not fresh.known)
        if not fresh.known:
            with clock("score"):
                fresh = self.scorer.after(optimised.scores, sequences, rollouts)
            groups = self._groups(asked, fresh.scores, step)
            taken_in = self.replay.take_in(groups, step)
        with clock("rollout"):
            self._wait_for_next()  # the engine takes no weights while it generates
        with clock("push"):
            self.answerer.engine.push_weights(self.policy.weights())
        self.generated_tokens += sum(rollout.tokens for rollout in rollouts)
        work = self._work(fresh, groups, rows, optimised)
        record = StepRecord(
            step=step,
            groups=groups,
            sources=[self.questions[question].source for question in asked.questions],
            answers=asked.answers,
            compared=fresh.compared,
            stale=planned.produced is not None,
            selected=[*(one for of_group in joined for one in of_group), *late],
            pass_rate=taken_in.pass_rate,
            replay=self.replay,
            optimised=optimised,
            generated_tokens=self.generated_tokens,
            seconds=clock.seconds,
            work=work,
        )
        notes = (taken_in.note, self.idle.observe(bool(trained) and not optimised.updates, trained))
        return self._result(record, [group for group in trained if not group.fresh], notes)

    @staticmethod
    def _result(record: StepRecord, late: Sequence[Group], notes: Sequence[str | None]) -> StepResult:
        """What to look at: the groups that were asked, and behind them those of stored answers alone."""
        groups = [*record.groups, *late]
        of_question = [*record.answers.of_question, *([] for _ in late)]
        entropies = {id(one.trajectory): one.entropy for one in record.selected}
        return StepResult(
            metrics=step_metrics(record),
            questions=[group.question for group in groups],
            answers=dataclasses.replace(record.answers, of_question=of_question),
            replayed=[group.replayed for group in groups],
            entropies=[tuple(entropies[id(row)] for row in group.replayed) for group in groups],
            work=record.work,
            notes=tuple(filter(None, notes)),
            applied=tuple(update.applied for update in record.optimised.updates),
        )

    def _ask(self, planned: PlannedStep, joined: list[list[Selected]], step: int) -> Asked:
        """The fresh answers of the planned groups; with refills, further questions while too few have a gradient."""
        produced = planned.produced.result() if planned.produced else self._produce(planned.groups, step)
        asked = Asked([group.question for group in planned.groups], joined, self.answerer.join(produced))
        for _ in range(self.config.rollout.refills):
            missing = self.config.questions - sum(map(_teaches, self._net_rewards(asked)))
            more = self.replay.more(missing, step, asked.questions) if missing > 0 else []
            if not more:
                break
            further = self.answerer.join(self._produce(more, step))
            asked = Asked(
                [*asked.questions, *(group.question for group in more)],
                [*asked.joined, *([] for _ in more)],
                asked.answers.and_further(further),
            )
        return asked

    def _settle(self, groups: list[Group], step: int) -> tuple[list[Group], list[Selected]]:
        """The groups that are trained on, and the stored answers that came only now."""
        if self.config.rollout.refills:
            teaching = [group for group in groups if _teaches([row.net_reward for row in group.rows])]
            groups = teaching[: self.config.questions] or groups
        return self.replay.settle(groups, self.config.questions, step)

    def _weigh(self, groups: Sequence[Group]) -> tuple[list[list[float]], list[Weighed]]:
        """The advantages of the rows that are trained on, and the terms of the replayed ones."""
        setting = self.replay.setting
        of_groups = advantages(groups, scale_by_std=setting.scale_by_std, leave_one_out=setting.leave_one_out)
        return of_groups, self.weigher(groups, of_groups)

    def _mean_scores(self, trajectories: Sequence[Trajectory]) -> list[MeanScore]:
        """Trajectories are compared at temperature 1, whatever the rollout temperature."""
        scores = self._score(trajectories, 1.0)
        return [
            MeanScore(float(row.own(score.entropy).mean()), float(-row.own(score.log_prob).mean()))
            for row, score in zip(trajectories, scores, strict=True)
        ]

    def _score(self, trajectories: Sequence[Trajectory], temperature: float) -> list[Score]:
        sequences = [
            TokenSequence(self._prompt(row.question), row.response, written=row.written) for row in trajectories
        ]
        self._compared += together(sequences)
        return self.policy.score(sequences, temperature)

    def _prompt(self, question: int) -> TokenIds:
        return np.array(self.questions[question].prompt, dtype=np.int32)

    def _produce(self, groups: Sequence[PlannedGroup], step: int) -> Produced:
        """The fresh answers of some groups."""
        return self.answerer.produce(
            [self.questions[group.question] for group in groups],
            [group.fresh for group in groups],
            self.sampling,
            derive_seed(self.config.seed, "rollouts", step),
        )

    def _begin_next(self, step: int) -> PlannedStep | None:
        """Begin to generate for a step with the policy as it is before the present step's update.

        Everything that its plan depends on is settled by then; only which answer is replayed is not.
        """
        if not self.config.rollout.ahead or step > self.config.steps:
            return None
        groups = self.replay.plan(self.config.questions, step)
        return PlannedStep(groups, self._background.submit(self._produce, groups, step))

    def _wait_for_next(self) -> None:
        if self._next and self._next.produced:
            self._next.produced.exception()

    def _sequences(self, asked: Asked) -> list[TokenSequence]:
        return [
            TokenSequence(self._prompt(question), answer.rollout.response, written=answer.rollout.written)
            for question, of_question in zip(asked.questions, asked.answers.of_question, strict=True)
            for answer in of_question
        ]

    def _groups(self, asked: Asked, of_fresh: Sequence[Score], step: int) -> list[Group]:
        """Groups of trajectories with the log-probs of the policy that wrote them, and scores before the update."""
        scores = iter(of_fresh)
        groups = []
        for question, joined, of_question in zip(asked.questions, asked.joined, asked.answers.of_question, strict=True):
            of_group = tuple(islice(scores, len(of_question)))
            fresh = [
                self._trajectory(question, answer, score, step)
                for answer, score in zip(of_question, of_group, strict=True)
            ]
            groups.append(dataclasses.replace(self.replay.group(question, joined, fresh), scores=of_group))
        return groups

    def _trajectory(self, question: int, answer: Answer, score: Score, step: int) -> Trajectory:
        behaviour = self.config.rollout.behaviour
        log_prob = score.log_prob if behaviour == "trainer" else answer.rollout.log_prob
        assert log_prob is not None  # the engine was asked for them
        return Trajectory(
            question=question,
            response=answer.rollout.response,
            log_prob=log_prob,
            finished=answer.rollout.finished,
            reward=answer.reward,
            step=step,
            behaviour=behaviour,
            key=answer.key,
            penalty=self._penalty(answer),
            written=answer.rollout.written,
        )

    def _penalty(self, answer: Answer) -> float:
        return overlong_penalty(len(answer.rollout.response), self.config.rollout.max_tokens, self.config.objective)

    def _net_rewards(self, asked: Asked) -> list[list[float]]:
        """Of all answers of each group."""
        return [
            [
                *(answer.reward - self._penalty(answer) for answer in of_question),
                *(one.trajectory.net_reward for one in joined),
            ]
            for of_question, joined in zip(asked.answers.of_question, asked.joined, strict=True)
        ]

    def _rows(
        self, groups: Sequence[Group], of_groups: Sequence[Sequence[float]], replayed: Sequence[Weighed]
    ) -> list[list[TrainingRow]]:
        """The rows of each group, beside the reference if there is one."""
        rows = build_rows(
            groups,
            of_groups,
            self._prompt,
            replayed=replayed,
            mismatch_cap=self.config.rollout.mismatch_cap,
            trained=self._trained,
            learnt=lambda row: row.finished or not self.config.objective.overlong_filter,
        )
        return self.reference.beside(rows) if self.reference else rows

    def _update(self, rows: Sequence[Sequence[TrainingRow]], *, replays: bool, keep_scores: bool) -> OptimiserSteps:
        """One optimiser step per mini-batch that has an advantage; the scores that it computes are kept if asked.

        Without an advantage, a mini-batch has only its entropy bonus. AdamW would make a full step of that, however
        small its gradient is.
        """
        objective, optimizer = self.config.objective, self.config.optimizer
        minibatches = [
            minibatch
            for _ in range(optimizer.passes)
            for minibatch in build_minibatches(
                rows, optimizer.minibatches, self.batch_rng, objective, self.config.rollout.max_tokens
            )
        ]
        term = self.weigher.term
        clip = objective.clip_with_replay or term == "clipped" or not replays
        active = [minibatch for minibatch in minibatches if minibatch.has_advantage]
        updates = [
            self.policy.update(minibatch, objective, clip=clip, term=term, keep_scores=keep_scores)
            for minibatch in active
        ]
        scores = [score for update in updates for score in update.scores]
        rows_read = [row for minibatch in active for row in minibatch.rows]
        self.skipped_updates += sum(not update.applied for update in updates)
        return OptimiserSteps(
            updates=updates,
            idle=len(minibatches) - len(active),
            groups=len(rows),
            idle_groups=sum(all(row.masked or row.advantage == 0 for row in of_group) for of_group in rows),
            tokens=sum(minibatch.tokens for minibatch in minibatches),
            read=together(rows_read),
            skipped=self.skipped_updates,
            learning_rate=self.policy.learning_rate,
            scores={id(row.response): score for row, score in zip(rows_read, scores, strict=True)}
            if keep_scores
            else {},
        )

    def _work(
        self,
        fresh: FreshScores,
        groups: Sequence[Group],
        rows: Sequence[Sequence[TrainingRow]],
        optimised: OptimiserSteps,
    ) -> Work:
        """What the model was asked for."""
        written = together(
            TokenSequence(self._prompt(group.question), row.response, written=row.written)
            for group in groups
            for row in group.fresh
        )
        by_reference = [row for of_group in rows for row in of_group if row.reference_log_prob is not None]
        scored = [*together(fresh.scored), *together(by_reference)]
        return {"select": self._compared, "generate": written, "score": scored, "update": optimised.read}

    def _trained(self, group: Group) -> bool:
        """Whether a group is in the trained band.

        A step on one band is the part of a whole step that this band contributes, not a smaller batch.
        """
        if not group.fresh:  # of stored answers alone: it says nothing about the current policy
            return True
        samples = self.config.rollout.samples
        count = self.replay.memory.evidence(group).count(samples)
        return in_band(count, samples, self.config.objective.train_on)

    def state(self) -> ReplayState:
        """The state between two steps, besides the policy.

        It is the state of the replay, with the trainer's own counters, generator and plan among the values.
        """
        replay = self.replay.state()
        generators = {**replay.values["generators"], "batch": self.batch_rng.bit_generator.state}
        # Answers that were generated ahead are generated again: by then the policy is a newer one.
        ahead = self._next and numbers_of(self._next.groups)
        own = {"skipped_updates": self.skipped_updates, "generated_tokens": self.generated_tokens, "ahead": ahead}
        return ReplayState({**replay.values, **own, "generators": generators}, replay.arrays, replay.trajectories)

    def restore(self, state: ReplayState) -> None:
        """Go on from a state of a trainer with the same configuration and questions."""
        self.replay.restore(state)
        values = state.values
        self.skipped_updates, self.generated_tokens = values["skipped_updates"], values["generated_tokens"]
        self.batch_rng.bit_generator.state = values["generators"]["batch"]
        if values["ahead"]:
            self._next = PlannedStep(planned_from(values["ahead"]))


def _teaches(rewards: Sequence[float]) -> bool:
    """Whether answers with these rewards have an advantage in their group."""
    return max(rewards) - min(rewards) > EPSILON
