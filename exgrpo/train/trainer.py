"""The training loop (arXiv 2510.02245, algorithm 1), readable from top to bottom."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from exgrpo.train.answers import Answer, Answerer, Answers, Produced
from exgrpo.train.config import Config
from exgrpo.train.data.questions import QuestionSet
from exgrpo.train.experience import (
    DelayedStart,
    ExperienceMemory,
    FreshQuestions,
    StepPlan,
    count_successes,
    in_band,
    plan_questions,
    question_law,
    select_trajectory,
)
from exgrpo.train.metrics.idle import IdleSteps
from exgrpo.train.metrics.step import step_metrics
from exgrpo.train.policy.batch import MiniBatch, Row, build_minibatches, build_rows
from exgrpo.train.policy.mismatch import mismatch_metrics
from exgrpo.train.policy.update import UpdateStats
from exgrpo.train.policy.zero3 import Policy, Score
from exgrpo.train.records import Group, TokenIds, Trajectory
from exgrpo.train.reward.success import RewardWatch, is_success
from exgrpo.train.rollout import Sampling, Stops
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
        notes: sentences that a person should read.
    """

    metrics: dict[str, float]
    questions: list[int]
    answers: Answers
    replayed: list[Trajectory | None]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class _Ahead:
    """The next step's questions, and its answers where they are already being generated."""

    plan: StepPlan
    produced: Future[Produced] | None


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
            log_prob=config.rollout.behaviour == "engine" or answerer.engine.free_log_prob,
            stop=Stops(config.rollout.stop, answerer.decode),
        )
        experience = config.experience
        self.memory = ExperienceMemory(
            len(self.questions),
            config.rollout.samples,
            success=config.reward.success,
            count_replayed=experience.count_replayed,
            max_per_question=experience.max_per_question,
            max_age=experience.max_age,
            retire=experience.retire and experience.ratio > 0,  # plain GRPO retires nothing
            bucket_by=experience.bucket_by,
        )
        self.law = question_law(
            experience.question_weight, config.rollout.samples, mu=experience.mu, sigma=experience.sigma
        )
        self.latch = DelayedStart(experience.start_pass_rate)
        self.watch = RewardWatch(config.reward.success, "reward.success")
        self.pool = FreshQuestions(len(self.questions), generator(config.seed, "fresh questions"))
        self.replay_rng = generator(config.seed, "replay")
        self.batch_rng = generator(config.seed, "mini-batches")
        self.idle = IdleSteps()
        self.skipped_updates = 0
        self.generated_tokens = 0
        self._ahead: _Ahead | None = None
        self._background = ThreadPoolExecutor(1, "rollouts")

    def step(self, step: int) -> StepResult | None:
        """One training step; None where every question is retired and nothing is left to learn from."""
        clock = _Clock()
        replay = self._replays()
        with clock("select"):
            ahead = self._ahead or _Ahead(self._plan(), None)
            plan = ahead.plan
            replayed, replayed_entropy = self._select(plan.replayed)
        questions = [*plan.fresh.tolist(), *plan.replayed.tolist()]
        if not questions:
            return None
        of_group: list[Trajectory | None] = [*([None] * len(plan.fresh)), *replayed]
        with clock("rollout"):
            produced = ahead.produced.result() if ahead.produced else self._produce(plan, step)
            answers = self.answerer.join(produced)
        with clock("score"):
            groups, scores = self._score_groups(questions, answers, of_group, step)
        pass_rate = float(np.mean(is_success(answers.rewards, self.config.reward.success)))
        unfit = self.watch.observe(answers.rewards)
        self.memory.update(groups, step, collect=replay)
        # Continuous rewards may never be full ones; of 0 and 1 the mean is the pass rate.
        continuous = self.config.experience.bucket_by == "reward_deviation"
        self.latch.observe(float(answers.rewards.mean()) if continuous else pass_rate)
        self._ahead = self._begin_ahead(step + 1)
        with clock("update"):
            updates, idle_updates = self._update(groups)
        with clock("rollout"):
            self._wait_ahead()  # the engine takes no weights while it generates
        with clock("push"):
            self.answerer.engine.push_weights(self.policy.weights())
        self.generated_tokens += sum(len(rollout.response) for rollout in answers.rollouts)
        metrics = step_metrics(
            step=step,
            groups=groups,
            answers=answers,
            pass_rate=pass_rate,
            scores=scores,
            updates=updates,
            memory=self.memory,
            replayed_entropy=replayed_entropy,
            learning_rate=self.policy.learning_rate,
            replay_open=self.latch.open,
            skipped_updates=self.skipped_updates,
            idle_updates=idle_updates,
            generated_tokens=self.generated_tokens,
            seconds=clock.seconds,
        )
        metrics |= {"staleness": float(ahead.produced is not None), **self._mismatch(answers, scores)}
        notes = (unfit, self.idle.observe(not updates, groups))
        return StepResult(metrics, questions, answers, of_group, tuple(filter(None, notes)))

    def _replays(self) -> bool:
        return self.latch.open and self.config.experience.ratio > 0

    def _plan(self) -> StepPlan:
        return plan_questions(
            self.memory,
            self.pool,
            self.replay_rng,
            batch=self.config.questions,
            ratio=self.config.experience.ratio,
            law=self.law,
            replay=self._replays(),
        )

    def _begin_ahead(self, step: int) -> _Ahead | None:
        """Begin to generate for a step with the policy as it is before the present step's update.

        Everything that its plan depends on is settled by then; only which success is replayed is not.
        """
        if not self.config.rollout.ahead or step > self.config.steps:
            return None
        plan = self._plan()
        return _Ahead(plan, self._background.submit(self._produce, plan, step))

    def _wait_ahead(self) -> None:
        if self._ahead and self._ahead.produced:
            self._ahead.produced.exception()

    def _mismatch(self, answers: Answers, scores: Sequence[Score]) -> dict[str, float]:
        """How far the engine's log-probs are from the trainer's; nothing where the engine gave none."""
        of_engine = [rollout.log_prob for rollout in answers.rollouts if rollout.log_prob is not None]
        if not of_engine:
            return {}
        numbers = mismatch_metrics([score.log_prob for score in scores], of_engine)
        return {f"mismatch/{name}": value for name, value in numbers.items()}

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
                "rewards_seen": self.watch.state(),
                "generators": {name: rng.bit_generator.state for name, rng in self._generators().items()},
                # Answers that were generated ahead are generated again: by then the policy is a newer one.
                "ahead": self._ahead and {name: of.tolist() for name, of in vars(self._ahead.plan).items()},
            },
            arrays={
                "count": self.memory.count,
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
        self.watch.restore(values["rewards_seen"])
        for name, rng in self._generators().items():
            rng.bit_generator.state = values["generators"][name]
        if values["ahead"]:
            plan = StepPlan(**{name: np.array(of, np.int64) for name, of in values["ahead"].items()})
            self._ahead = _Ahead(plan, None)
        self.memory.restore(arrays["count"], arrays["retired"].astype(bool), state.trajectories)

    def _prompt(self, question: int) -> TokenIds:
        return np.array(self.questions[question].prompt, dtype=np.int32)

    def _score(self, trajectories: Sequence[tuple[int, TokenIds]], temperature: float) -> list[Score]:
        return self.policy.score(
            [Row(self._prompt(q), response, np.zeros(len(response), np.float32)) for q, response in trajectories],
            temperature,
        )

    def _select(self, questions: npt.NDArray[np.int64]) -> tuple[list[Trajectory], float]:
        """The trajectory to replay for each drawn question, and their mean entropy (NaN where not computed).

        Candidates are compared at temperature 1, whatever the rollout temperature.
        """
        rule = self.config.experience.trajectory
        candidates = [self.memory.trajectories(int(question)) for question in questions]
        scored = [c for of_question in candidates for c in of_question] if rule in SCORED_RULES else []
        scores = dict(zip(map(id, scored), self._score([(c.question, c.response) for c in scored], 1.0), strict=True))
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
        if not self.config.objective.importance_correction:
            # Ablation: the past policy is taken to be the one before this step's update.
            present = self._score([(c.question, c.response) for c in chosen], self.sampling.temperature)
            chosen = [
                dataclasses.replace(trajectory, log_prob=score.log_prob, behaviour="trainer")
                for trajectory, score in zip(chosen, present, strict=True)
            ]
        return chosen, float(np.mean(entropy)) if entropy else float("nan")

    def _produce(self, plan: StepPlan, step: int) -> Produced:
        """K fresh answers to each question, one fewer where a replayed one takes a place in the group."""
        samples = self.config.rollout.samples
        return self.answerer.produce(
            [self.questions[question] for question in (*plan.fresh, *plan.replayed)],
            [*([samples] * len(plan.fresh)), *([samples - 1] * len(plan.replayed))],
            self.sampling,
            derive_seed(self.config.seed, "rollouts", step),
        )

    def _score_groups(
        self, questions: Sequence[int], answers: Answers, replayed: Sequence[Trajectory | None], step: int
    ) -> tuple[list[Group], list[Score]]:
        """Groups of trajectories with the log-probs of the policy that wrote them, and scores before the update."""
        scores = self._score(
            [
                (question, answer.rollout.response)
                for question, of_question in zip(questions, answers.of_question, strict=True)
                for answer in of_question
            ],
            self.sampling.temperature,
        )
        rest = iter(scores)
        groups = []
        for question, of_question, row in zip(questions, answers.of_question, replayed, strict=True):
            own = tuple(next(rest).log_prob for _ in of_question)
            fresh = tuple(
                self._trajectory(question, answer, log_prob, step)
                for answer, log_prob in zip(of_question, own, strict=True)
            )
            by_engine = self.config.rollout.behaviour == "engine"
            groups.append(Group(question, fresh, row, recomputed=own if by_engine else None))
        return groups, scores

    def _trajectory(self, question: int, answer: Answer, recomputed: npt.NDArray[np.float32], step: int) -> Trajectory:
        behaviour = self.config.rollout.behaviour
        log_prob = recomputed if behaviour == "trainer" else answer.rollout.log_prob
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

    def _update(self, groups: Sequence[Group]) -> tuple[list[UpdateStats], int]:
        """One optimiser step per mini-batch, and the number of mini-batches that gave none.

        Without an advantage in it, a mini-batch has only its entropy bonus. AdamW would make a full step of that,
        however small its gradient is.
        """
        objective = self.config.objective
        minibatches = build_minibatches(
            build_rows(
                groups,
                self._prompt,
                scale_by_std=objective.scale_by_std,
                mismatch_cap=self.config.rollout.mismatch_cap,
            ),
            self.config.optimizer.minibatches,
            self.batch_rng,
            objective,
            self.config.rollout.max_tokens,
        )
        minibatches = self._mask(minibatches, groups)
        clip = objective.clip_with_replay or all(group.replayed is None for group in groups)
        active = [minibatch for minibatch in minibatches if minibatch.has_advantage]
        updates = [self.policy.update(minibatch, objective, clip=clip) for minibatch in active]
        self.skipped_updates += sum(not update.applied for update in updates)
        return updates, len(minibatches) - len(active)

    def _mask(self, minibatches: list[MiniBatch], groups: Sequence[Group]) -> list[MiniBatch]:
        """Leave out the rows of groups outside the trained band; what the losses are divided by stays.

        So a step on one band is the part of a whole step that this band contributes, not a smaller batch.
        """
        config, samples = self.config, self.config.rollout.samples
        masked = set()
        for group in groups:
            evidence = count_successes(group, config.reward.success, count_replayed=config.experience.count_replayed)
            if not in_band(evidence.count(samples), samples, config.objective.train_on):
                masked |= {id(row.response) for row in group.rows}
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
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
