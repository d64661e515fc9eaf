"""What an ExGRPO run in TRL remembers between generations, on :mod:`exgrpo.train.experience`; it needs no TRL."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from exgrpo.train.checkpoint.store import ExperienceStore, read_checked, write_checked
from exgrpo.train.config import ExperienceConfig
from exgrpo.train.experience import (
    DelayedStart,
    ExperienceMemory,
    FreshQuestions,
    StepPlan,
    plan_questions,
    question_law,
)
from exgrpo.train.records import Group
from exgrpo.train.reward.success import RewardWatch, is_success
from exgrpo.train.seeds import generator

STATE = "state.json"


class TakenIn(NamedTuple):
    """What taking in a generation leaves to be told: the fraction of fresh successes, and a sentence or None."""

    pass_rate: float
    note: str | None


class Replay:
    """Experience memory, delayed start, and which questions come next.

    Every process holds the same one and takes the same decisions from the same groups.

    Args:
        config: how experience is kept and drawn.
        questions: number of questions; they are known by index.
        samples: K, answers per question.
        seed: of the draws.
        success: a reward of at least this is a success.

    Attributes:
        generation: number of generations taken in so far. What is a training step to `exgrpo.train` is one here, so
            this is the step of a trajectory, and what `max_age` counts.
    """

    def __init__(
        self, config: ExperienceConfig, questions: int, samples: int, seed: int, *, success: float = 1.0
    ) -> None:
        self.config = config
        self.success = success
        self.generation = 0
        self.memory = ExperienceMemory(
            questions,
            samples,
            success=success,
            count_replayed=config.count_replayed,
            max_per_question=config.max_per_question,
            max_age=config.max_age,
            retire=config.retire and config.ratio > 0,
            bucket_by=config.bucket_by,
        )
        self.latch = DelayedStart(config.start_pass_rate)
        self.watch = RewardWatch(success, "success")
        self.pool = FreshQuestions(questions, generator(seed, "fresh questions"))
        self.rng = generator(seed, "replay")
        self._law = question_law(config.question_weight, samples, mu=config.mu, sigma=config.sigma)

    @property
    def on(self) -> bool:
        """Whether the next generation replays and what it collects is kept."""
        return self.latch.open and self.config.ratio > 0

    @property
    def finished(self) -> bool:
        """Whether every question is solved."""
        return bool(self.memory.retired.all())

    def plan(self, batch: int) -> StepPlan:
        """The questions of the next generation, exactly `batch` of them.

        Where too few are unsolved, retired ones fill up: they teach little, and the batch keeps its shape.
        """
        plan = plan_questions(
            self.memory,
            self.pool,
            self.rng,
            batch=batch,
            ratio=self.config.ratio,
            law=self._law,
            replay=self.on,
        )
        missing = batch - len(plan.fresh) - len(plan.replayed)
        if missing == 0:
            return plan
        solved = self.rng.choice(np.flatnonzero(self.memory.retired), missing, replace=False)
        return StepPlan(np.concatenate([plan.fresh, solved]), plan.replayed)

    def take_in(self, groups: Sequence[Group]) -> TakenIn:
        """Learn what the graded groups of a generation show."""
        rewards = np.array([row.reward for group in groups for row in group.fresh])
        pass_rate = float(np.mean(is_success(rewards, self.success)))
        self.memory.update(groups, self.generation, collect=self.on)
        self.generation += 1
        self.latch.observe(float(rewards.mean()) if self.config.bucket_by == "reward_deviation" else pass_rate)
        return TakenIn(pass_rate, self.watch.observe(rewards))

    def save(self, folder: Path) -> None:
        """Write the state to a folder, which is made."""
        index = ExperienceStore(folder).save(self.memory.all_trajectories())
        arrays: dict[str, np.ndarray] = {
            "count": self.memory.count,
            "retired": self.memory.retired.astype(np.uint8),
            "pool_order": self.pool.order,
        }
        state = {
            "arrays": write_checked(folder, {**index, **arrays}),
            "open": self.latch.open,
            "generation": self.generation,
            "rewards_seen": self.watch.state(),
            "pool_position": self.pool.position,
            "pool": self.pool.rng.bit_generator.state,
            "replay": self.rng.bit_generator.state,
        }
        (folder / STATE).write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Go on from a saved state.

        Raises:
            ValueError: there is none, it belongs to another number of questions, or a file is damaged.
        """
        if not (folder / STATE).is_file():
            raise ValueError(
                f"{folder} holds no experience: that checkpoint is not from ExGRPOTrainer; to start from its weights, "
                "give it as the model and leave resume_from_checkpoint out"
            )
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        arrays = read_checked(folder, state["arrays"])
        if len(arrays["count"]) != len(self.memory.count):
            raise ValueError(
                f"{folder} is the experience of {len(arrays['count'])} questions and train_dataset has "
                f"{len(self.memory.count)}: resume with the data set of the run"
            )
        self.memory.restore(arrays["count"], arrays["retired"].astype(bool), ExperienceStore(folder).load(arrays))
        self.latch.open, self.generation = state["open"], state["generation"]
        self.watch.restore(state["rewards_seen"])
        self.pool.order, self.pool.position = arrays["pool_order"].copy(), state["pool_position"]
        self.pool.rng.bit_generator.state = state["pool"]
        self.rng.bit_generator.state = state["replay"]
