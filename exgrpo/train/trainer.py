"""The training loop (arXiv 2510.02245, algorithm 1), readable from top to bottom."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from exgrpo.train.answers import Answerer, Answers
from exgrpo.train.batch import MiniBatch, Row, build_minibatches, build_rows
from exgrpo.train.config import Config
from exgrpo.train.data import QuestionSet
from exgrpo.train.experience import (
    DelayedStart,
    ExperienceMemory,
    FreshQuestions,
    bucket_log_weights,
    estimate_successes,
    in_band,
    plan_questions,
    select_trajectory,
)
from exgrpo.train.metrics import step_metrics
from exgrpo.train.policy import Policy, Score, UpdateStats
from exgrpo.train.records import Group, TokenIds, Trajectory
from exgrpo.train.rollout import Sampling
from exgrpo.train.seeds import derive_seed, generator

SCORED_RULES = ("lowest_entropy", "highest_entropy", "lowest_nll")


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a training step leaves to be looked at.

    Attributes:
        metrics: plain numbers by name, as written to metrics.jsonl.
        questions: index of the question of each group, fresh ones first.
        answers: the fresh answers of each group.
        replayed: the replayed trajectory of each group, or None.
    """

    metrics: dict[str, float]
    questions: list[int]
    answers: Answers
    replayed: list[Trajectory | None]


@dataclass(frozen=True, eq=False)
class TrainerState:
    """Everything a trainer needs to go on exactly where it was, besides the policy.

    Attributes:
        values: plain numbers, and the states of the generators.
        arrays: of the memory and the question pool.
        trajectories: the experience buffer, by question and oldest first.
    """

    values: dict[str, Any]
    arrays: dict[str, np.ndarray]
    trajectories: list[Trajectory]


class Trainer:
    """The state of a run between steps, and the step.

    Every rank holds the same memory, latch and generators and takes the same decisions from the same data; only
    generation, grading and the passes through the model are shared out.

    Args:
        config: the run.
        questions: what to train on.
        policy: the model and its optimiser.
        answerer: generates and grades.
    """

    def __init__(self, config: Config, questions: QuestionSet, policy: Policy, answerer: Answerer) -> None:
        self.config = config
        self.questions = questions.questions
        self.policy = policy
        self.answerer = answerer
        self.sampling = Sampling(
            max_tokens=config.rollout.max_tokens,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
        )
        experience = config.experience
        self.memory = ExperienceMemory(
            len(self.questions),
            config.rollout.samples,
            count_replayed=experience.count_replayed,
            max_per_question=experience.max_per_question,
            max_age=experience.max_age,
            retire=experience.retire and experience.ratio > 0,  # plain GRPO retires nothing
            bucket_by=experience.bucket_by,
        )
        self.law = bucket_log_weights(
            experience.question_weight, config.rollout.samples, mu=experience.mu, sigma=experience.sigma
        )
        self.latch = DelayedStart(experience.start_pass_rate)
        self.pool = FreshQuestions(len(self.questions), generator(config.seed, "fresh questions"))
        self.replay_rng = generator(config.seed, "replay")
        self.batch_rng = generator(config.seed, "mini-batches")
        self.skipped_updates = 0
        self.generated_tokens = 0

    def step(self, step: int) -> StepResult | None:
        """One training step; None where every question is retired and nothing is left to learn from."""
        clock = _Clock()
        replay = self.latch.open and self.config.experience.ratio > 0
        with clock("select"):
            plan = plan_questions(
                self.memory,
                self.pool,
                self.replay_rng,
                batch=self.config.questions,
                ratio=self.config.experience.ratio,
                log_weights=self.law,
                replay=replay,
            )
            replayed, replayed_entropy = self._select(plan.replayed)
        questions = [*plan.fresh.tolist(), *plan.replayed.tolist()]
        if not questions:
            return None
        of_group: list[Trajectory | None] = [*([None] * len(plan.fresh)), *replayed]
        with clock("rollout"):
            answers = self._rollout(questions, of_group, step)
        with clock("score"):
            groups, scores = self._grade_and_score(questions, answers, of_group, step)
        pass_rate = float(np.mean(answers.rewards >= 1.0))
        self.memory.update(groups, step, collect=replay)
        # Continuous rewards may never be full ones; of 0 and 1 the mean is the pass rate.
        continuous = self.config.experience.bucket_by == "reward_deviation"
        self.latch.observe(float(answers.rewards.mean()) if continuous else pass_rate)
        with clock("update"):
            updates = self._update(groups, replay)
        with clock("push"):
            self.answerer.engine.push_weights(self.policy.weights())
        self.generated_tokens += sum(len(rollout.response) for rollout in answers.rollouts)
        metrics = step_metrics(
            step=step,
            groups=groups,
            answers=answers,
            scores=scores,
            updates=updates,
            memory=self.memory,
            replayed_entropy=replayed_entropy,
            learning_rate=self.policy.learning_rate,
            replay_open=self.latch.open,
            skipped_updates=self.skipped_updates,
            generated_tokens=self.generated_tokens,
            seconds=clock.seconds,
        )
        return StepResult(metrics, questions, answers, of_group)

    def _generators(self) -> dict[str, np.random.Generator]:
        return {"pool": self.pool.rng, "replay": self.replay_rng, "batch": self.batch_rng}

    def state(self) -> TrainerState:
        """The state between two steps."""
        return TrainerState(
            values={
                "replay_open": self.latch.open,
                "pool_position": self.pool.position,
                "skipped_updates": self.skipped_updates,
                "generated_tokens": self.generated_tokens,
                "generators": {name: rng.bit_generator.state for name, rng in self._generators().items()},
            },
            arrays={
                "bucket": self.memory.bucket,
                "retired": self.memory.retired.astype(np.uint8),
                "pool_order": self.pool.order,
            },
            trajectories=self.memory.all_trajectories(),
        )

    def restore(self, state: TrainerState) -> None:
        """Go on from a state of a trainer with the same configuration and questions."""
        values, arrays = state.values, state.arrays
        self.latch.open = values["replay_open"]
        self.pool.position, self.pool.order = values["pool_position"], arrays["pool_order"].copy()
        self.skipped_updates, self.generated_tokens = values["skipped_updates"], values["generated_tokens"]
        for name, rng in self._generators().items():
            rng.bit_generator.state = values["generators"][name]
        self.memory.restore(arrays["bucket"], arrays["retired"].astype(bool), state.trajectories)

    def _prompt(self, question: int) -> TokenIds:
        return np.array(self.questions[question].prompt, dtype=np.int32)

    def _score(self, trajectories: Sequence[tuple[int, TokenIds]]) -> list[Score]:
        return self.policy.score(
            [Row(self._prompt(q), response, np.zeros(len(response), np.float32)) for q, response in trajectories]
        )

    def _select(self, questions: npt.NDArray[np.int64]) -> tuple[list[Trajectory], float]:
        """The trajectory to replay for each drawn question, and their mean entropy (NaN where not computed)."""
        rule = self.config.experience.trajectory
        correct = self.config.objective.importance_correction
        candidates = [self.memory.trajectories(int(question)) for question in questions]
        scored = [c for of_question in candidates for c in of_question] if rule in SCORED_RULES or not correct else []
        scores = dict(zip(map(id, scored), self._score([(c.question, c.response) for c in scored]), strict=True))
        chosen = []
        for of_question in candidates:
            of_candidates = [scores[id(c)] for c in of_question] if scored else []
            trajectory = select_trajectory(
                rule,
                of_question,
                entropy=np.array([score.entropy.mean() for score in of_candidates]),
                nll=np.array([-score.log_prob.mean() for score in of_candidates]),
                rng=self.replay_rng,
            )
            chosen.append(trajectory)
        entropy = [float(scores[id(c)].entropy.mean()) for c in chosen if scored]
        if not correct:
            # Ablation: the past policy is taken to be the one before this step's update.
            chosen = [dataclasses.replace(c, log_prob=scores[id(c)].log_prob) for c in chosen]
        return chosen, float(np.mean(entropy)) if entropy else float("nan")

    def _rollout(self, questions: Sequence[int], replayed: Sequence[Trajectory | None], step: int) -> Answers:
        """K fresh answers to each question, one fewer where a replayed one takes a place in the group."""
        return self.answerer.answer(
            [self.questions[question] for question in questions],
            [self.config.rollout.samples - (row is not None) for row in replayed],
            self.sampling,
            derive_seed(self.config.seed, "rollouts", step),
        )

    def _grade_and_score(
        self, questions: Sequence[int], answers: Answers, replayed: Sequence[Trajectory | None], step: int
    ) -> tuple[list[Group], list[Score]]:
        """Groups of trajectories with the behaviour log-probs of the policy before the update."""
        scores = self._score(
            [
                (question, answer.rollout.response)
                for question, of_question in zip(questions, answers.of_question, strict=True)
                for answer in of_question
            ]
        )
        rows = iter(scores)
        groups = [
            Group(
                question,
                tuple(
                    Trajectory(
                        question=question,
                        response=answer.rollout.response,
                        log_prob=next(rows).log_prob,
                        finished=answer.rollout.finished,
                        reward=answer.reward,
                        step=step,
                    )
                    for answer in of_question
                ),
                row,
            )
            for question, of_question, row in zip(questions, answers.of_question, replayed, strict=True)
        ]
        return groups, scores

    def _update(self, groups: Sequence[Group], replay: bool) -> list[UpdateStats]:
        objective = self.config.objective
        minibatches = build_minibatches(
            build_rows(groups, self._prompt, scale_by_std=objective.scale_by_std),
            self.config.optimizer.minibatches,
            self.batch_rng,
            objective,
            self.config.rollout.max_tokens,
        )
        minibatches = self._mask(minibatches, groups)
        clip = objective.clip_with_replay or not replay
        updates = [self.policy.update(minibatch, objective, clip=clip) for minibatch in minibatches]
        self.skipped_updates += sum(not update.applied for update in updates)
        return updates

    def _mask(self, minibatches: list[MiniBatch], groups: Sequence[Group]) -> list[MiniBatch]:
        """Leave out the rows of groups outside the trained band; what the losses are divided by stays.

        So a step on one band is the part of a whole step that this band contributes, not a smaller batch.
        """
        samples, count_replayed = self.config.rollout.samples, self.config.experience.count_replayed
        masked = {
            id(row.response)
            for group in groups
            if not in_band(
                estimate_successes(group, samples, count_replayed=count_replayed),
                samples,
                self.config.objective.train_on,
            )
            for row in group.rows
        }
        return [
            dataclasses.replace(batch, rows=tuple(row for row in batch.rows if id(row.response) not in masked))
            for batch in minibatches
        ]


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start
