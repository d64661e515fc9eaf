"""The training loop (arXiv 2510.02245, algorithm 1), readable from top to bottom."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np

from exgrpo.train.answers import Answer, Answerer, Answers, Produced
from exgrpo.train.config import Config
from exgrpo.train.data.questions import QuestionSet
from exgrpo.train.experience import MeanScore, Mixture, Replay, ReplayState, Selected, StepPlan, in_band
from exgrpo.train.metrics.clock import PhaseClock
from exgrpo.train.metrics.idle import IdleSteps
from exgrpo.train.metrics.step import OptimiserSteps, StepRecord, step_metrics
from exgrpo.train.metrics.work import Reading, Work, together
from exgrpo.train.policy.batch import TokenSequence, build_minibatches, build_rows
from exgrpo.train.policy.zero3 import Policy
from exgrpo.train.records import Group, Score, TokenIds, Trajectory
from exgrpo.train.rollout import Sampling, Stops
from exgrpo.train.scores import FreshScorer, FreshScores
from exgrpo.train.seeds import derive_seed, generator


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a training step leaves to be looked at.

    Attributes:
        metrics: plain numbers by name, as written to metrics.jsonl.
        questions: index of the question of each group, fresh ones first.
        answers: the fresh answers of each group.
        replayed: the replayed trajectory of each group, or None.
        work: what the model read and wrote, by phase.
        notes: sentences that a person should read.
    """

    metrics: dict[str, float]
    questions: list[int]
    answers: Answers
    replayed: list[Trajectory | None]
    work: Work
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """The questions of a step, and its answers where they are generated while the step before updates."""

    plan: StepPlan
    produced: Future[Produced] | None = None


class Trainer:
    """The state of a run between steps, and the step.

    Every rank holds the same replay and generators and takes the same decisions from the same data; only generation,
    grading and the passes through the model are shared out.

    Args:
        config: the run.
        questions: what to train on.
        policy: the model and its optimiser.
        answerer: generates and grades.
    """

    def __init__(self, config: Config, questions: QuestionSet, policy: Policy, answerer: Answerer) -> None:
        self.config = config
        self.questions = questions.questions
        weights = config.data.train_weights
        self.policy = policy
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
            mixture=Mixture(questions.sizes, weights) if weights else None,
        )
        self.scorer = FreshScorer(config, policy)
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
            planned = self._next or PlannedStep(self.replay.plan(self.config.questions))
            questions = planned.plan.questions
            selected = self._select(planned.plan)
        if not questions:
            return None
        replayed = [*([None] * len(planned.plan.fresh)), *(one.trajectory for one in selected)]
        with clock("rollout"):
            produced = planned.produced.result() if planned.produced else self._produce(planned.plan, step)
            answers = self.answerer.join(produced)
        sequences = self._sequences(questions, answers)
        with clock("score"):
            fresh = self.scorer.before(sequences, answers.rollouts)
        groups = self._groups(questions, answers, fresh.scores, replayed, step)
        if fresh.known:
            taken_in = self.replay.take_in(groups, step)
        self._next = self._begin_next(step + 1)
        with clock("update"):
            optimised = self._update(groups, keep_scores=not fresh.known)
        if not fresh.known:
            with clock("score"):
                fresh = self.scorer.after(optimised.scores, sequences, answers.rollouts)
            groups = self._groups(questions, answers, fresh.scores, replayed, step)
            taken_in = self.replay.take_in(groups, step)
        with clock("rollout"):
            self._wait_for_next()  # the engine takes no weights while it generates
        with clock("push"):
            self.answerer.engine.push_weights(self.policy.weights())
        self.generated_tokens += sum(len(rollout.response) for rollout in answers.rollouts)
        work = self._work(fresh, groups, optimised)
        record = StepRecord(
            step=step,
            groups=groups,
            sources=[self.questions[question].source for question in questions],
            answers=answers,
            compared=fresh.compared,
            stale=planned.produced is not None,
            selected=selected,
            pass_rate=taken_in.pass_rate,
            replay=self.replay,
            optimised=optimised,
            generated_tokens=self.generated_tokens,
            seconds=clock.seconds,
            work=work,
        )
        notes = (taken_in.note, self.idle.observe(not optimised.updates, groups))
        return StepResult(step_metrics(record), questions, answers, replayed, work, tuple(filter(None, notes)))

    def _select(self, plan: StepPlan) -> list[Selected]:
        """The trajectory to replay for each replayed question."""
        selected = self.replay.select(plan.replayed, self._mean_scores)
        if self.config.objective.importance_correction:
            return selected
        # Ablation: the past policy is taken to be the one before this step's update.
        present = self._score([one.trajectory for one in selected], self.sampling.temperature)
        return [
            dataclasses.replace(
                one, trajectory=dataclasses.replace(one.trajectory, log_prob=score.log_prob, behaviour="trainer")
            )
            for one, score in zip(selected, present, strict=True)
        ]

    def _mean_scores(self, trajectories: Sequence[Trajectory]) -> list[MeanScore]:
        """Trajectories are compared at temperature 1, whatever the rollout temperature."""
        scores = self._score(trajectories, 1.0)
        return [MeanScore(float(score.entropy.mean()), float(-score.log_prob.mean())) for score in scores]

    def _score(self, trajectories: Sequence[Trajectory], temperature: float) -> list[Score]:
        sequences = [TokenSequence(self._prompt(row.question), row.response) for row in trajectories]
        self._compared += together(sequences)
        return self.policy.score(sequences, temperature)

    def _prompt(self, question: int) -> TokenIds:
        return np.array(self.questions[question].prompt, dtype=np.int32)

    def _produce(self, plan: StepPlan, step: int) -> Produced:
        """K fresh answers to each question, one fewer where a replayed one takes a place in the group."""
        samples = self.config.rollout.samples
        return self.answerer.produce(
            [self.questions[question] for question in plan.questions],
            [*([samples] * len(plan.fresh)), *([samples - 1] * len(plan.replayed))],
            self.sampling,
            derive_seed(self.config.seed, "rollouts", step),
        )

    def _begin_next(self, step: int) -> PlannedStep | None:
        """Begin to generate for a step with the policy as it is before the present step's update.

        Everything that its plan depends on is settled by then; only which success is replayed is not.
        """
        if not self.config.rollout.ahead or step > self.config.steps:
            return None
        plan = self.replay.plan(self.config.questions)
        return PlannedStep(plan, self._background.submit(self._produce, plan, step))

    def _wait_for_next(self) -> None:
        if self._next and self._next.produced:
            self._next.produced.exception()

    def _sequences(self, questions: Sequence[int], answers: Answers) -> list[TokenSequence]:
        return [
            TokenSequence(self._prompt(question), answer.rollout.response)
            for question, of_question in zip(questions, answers.of_question, strict=True)
            for answer in of_question
        ]

    def _groups(
        self,
        questions: Sequence[int],
        answers: Answers,
        of_fresh: Sequence[Score],
        replayed: Sequence[Trajectory | None],
        step: int,
    ) -> list[Group]:
        """Groups of trajectories with the log-probs of the policy that wrote them, and scores before the update."""
        scores = iter(of_fresh)
        groups = []
        for question, of_question, past in zip(questions, answers.of_question, replayed, strict=True):
            of_group = tuple(islice(scores, len(of_question)))
            fresh = tuple(
                self._trajectory(question, answer, score, step)
                for answer, score in zip(of_question, of_group, strict=True)
            )
            groups.append(Group(question, fresh, past, of_group))
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
        )

    def _update(self, groups: Sequence[Group], *, keep_scores: bool) -> OptimiserSteps:
        """One optimiser step per mini-batch that has an advantage; the scores that it computes are kept if asked.

        Without an advantage, a mini-batch has only its entropy bonus. AdamW would make a full step of that, however
        small its gradient is.
        """
        objective = self.config.objective
        rows = build_rows(
            groups,
            self._prompt,
            scale_by_std=objective.scale_by_std,
            mismatch_cap=self.config.rollout.mismatch_cap,
            trained=self._trained,
        )
        minibatches = build_minibatches(
            rows, self.config.optimizer.minibatches, self.batch_rng, objective, self.config.rollout.max_tokens
        )
        clip = objective.clip_with_replay or all(group.replayed is None for group in groups)
        active = [minibatch for minibatch in minibatches if minibatch.has_advantage]
        updates = [self.policy.update(minibatch, objective, clip=clip, keep_scores=keep_scores) for minibatch in active]
        scores = [score for update in updates for score in update.scores]
        rows_read = [row for minibatch in active for row in minibatch.rows]
        self.skipped_updates += sum(not update.applied for update in updates)
        return OptimiserSteps(
            updates=updates,
            idle=len(minibatches) - len(active),
            idle_groups=sum(all(row.masked or row.advantage == 0 for row in of_group) for of_group in rows),
            tokens=sum(minibatch.tokens for minibatch in minibatches),
            read=together(rows_read),
            skipped=self.skipped_updates,
            learning_rate=self.policy.learning_rate,
            scores={id(row.response): score for row, score in zip(rows_read, scores, strict=True)}
            if keep_scores
            else {},
        )

    def _work(self, fresh: FreshScores, groups: Sequence[Group], optimised: OptimiserSteps) -> Work:
        """What the model was asked for."""
        written = together(
            TokenSequence(self._prompt(group.question), row.response) for group in groups for row in group.fresh
        )
        scored = together(fresh.scored)
        return {"select": self._compared, "generate": written, "score": scored, "update": optimised.read}

    def _trained(self, group: Group) -> bool:
        """Whether a group is in the trained band.

        A step on one band is the part of a whole step that this band contributes, not a smaller batch.
        """
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
        ahead = self._next and {name: of.tolist() for name, of in vars(self._next.plan).items()}
        own = {"skipped_updates": self.skipped_updates, "generated_tokens": self.generated_tokens, "ahead": ahead}
        return ReplayState({**replay.values, **own, "generators": generators}, replay.arrays, replay.trajectories)

    def restore(self, state: ReplayState) -> None:
        """Go on from a state of a trainer with the same configuration and questions."""
        self.replay.restore(state)
        values = state.values
        self.skipped_updates, self.generated_tokens = values["skipped_updates"], values["generated_tokens"]
        self.batch_rng.bit_generator.state = values["generators"]["batch"]
        if values["ahead"]:
            plan = StepPlan(**{name: np.array(of, np.int64) for name, of in values["ahead"].items()})
            self._next = PlannedStep(plan)
