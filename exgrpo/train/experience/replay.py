"""Experience replay as one object: what a run remembers of earlier steps, and what it decides from that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from exgrpo.train.experience.buckets import BUCKETS, pass_rate
from exgrpo.train.experience.memory import ExperienceMemory, MemoryRules
from exgrpo.train.experience.plan import DelayedStart, FreshQuestions, Mixture, StepPlan, plan_questions
from exgrpo.train.experience.sampling import question_law
from exgrpo.train.experience.selection import RULES, Candidates, MeanScore
from exgrpo.train.experience.tables import look_up
from exgrpo.train.records import Group, Trajectory
from exgrpo.train.reward.success import RewardWatch
from exgrpo.train.seeds import generator

if TYPE_CHECKING:  # the configuration takes the names of rules from this package
    from exgrpo.train.config import ExperienceConfig

ScoreAll = Callable[[Sequence[Trajectory]], Sequence[MeanScore]]
"""Scores trajectories under the current policy at temperature 1, in the order in which they are given."""


@dataclass(frozen=True, eq=False)
class Selected:
    """The stored success that is replayed for a question.

    Attributes:
        trajectory: the chosen one.
        entropy: its mean token entropy in nats under the current policy; None where the rule asks for no scores.
        replays: how often it has been replayed, this time included.
    """

    trajectory: Trajectory
    entropy: float | None
    replays: int


class TakenIn(NamedTuple):
    """What taking in the groups of a step says: the fraction of fresh successes, and a note for a person or None."""

    pass_rate: float
    note: str | None


@dataclass(frozen=True, eq=False)
class ReplayState:
    """Everything that a `Replay` needs to go on exactly where it was.

    Attributes:
        values: plain numbers, and the states of the generators.
        arrays: of the memory and of the questions in their order.
        trajectories: the experience buffer, by question and oldest first.
    """

    values: dict[str, Any]
    arrays: dict[str, np.ndarray]
    trajectories: list[Trajectory]


class Replay:
    """Experience memory, delayed start, the law of questions, the rule of trajectories and their generators.

    Arrays and generators in, decisions out: no model, no process group. Every process holds the same one and takes
    the same decisions from the same groups.

    Args:
        config: how experience is kept and drawn.
        questions: number of questions; they are known by index 0..questions-1.
        samples: K, answers per question.
        seed: of the draws.
        success: a reward of at least this is a success.
        success_option: name of the option that sets `success`, for notes.
        mixture: the sources of the questions and their weights; None: they are one source.

    Attributes:
        memory: what is stored, and which questions are retired.
        latch: whether replay has begun.
        watch: whether rewards fit `success`.
        pool: the fresh questions.
        law: by which success counts are drawn, or None.
        rng: draws the replayed questions, and trajectories where the rule is random.
    """

    def __init__(
        self,
        config: "ExperienceConfig",
        questions: int,
        samples: int,
        seed: int,
        *,
        success: float = 1.0,
        success_option: str = "success",
        mixture: Mixture | None = None,
    ) -> None:
        self.ratio = config.ratio
        rules = MemoryRules(
            success=success,
            count_replayed=config.count_replayed,
            max_per_question=config.max_per_question,
            max_age=config.max_age,
            retire=config.retire and config.ratio > 0,  # plain GRPO retires nothing
            bucket_by=config.bucket_by,
        )
        self.memory = ExperienceMemory(questions, samples, rules)
        self.latch = DelayedStart(config.start_pass_rate)
        self.watch = RewardWatch(success, success_option)
        self.pool = FreshQuestions(questions, generator(seed, "fresh questions"), mixture)
        self.law = question_law(config.question_weight, samples, mu=config.mu, sigma=config.sigma)
        self.rng = generator(seed, "replay")
        self._progress = look_up(BUCKETS, config.bucket_by, "bucket_by").progress
        self._rule = look_up(RULES, config.trajectory, "trajectory rule")

    @property
    def active(self) -> bool:
        """Whether the next step replays, and stores what it collects."""
        return self.latch.open and self.ratio > 0

    @property
    def finished(self) -> bool:
        """Whether every question is retired."""
        return bool(self.memory.retired.all())

    def plan(self, batch: int) -> StepPlan:
        """The questions of the next step: `batch` of them, or fewer where too few are left unretired."""
        ratio = self.ratio if self.active else 0.0
        return plan_questions(self.memory, self.pool, self.rng, batch=batch, ratio=ratio, law=self.law)

    def select(self, questions: npt.NDArray[np.int64], score: ScoreAll) -> list[Selected]:
        """The trajectory to replay for each of some buffered questions; each choice counts as a replay.

        Args:
            questions: [n] indices of questions with stored trajectories.
            score: is called once, with all candidates, if the rule compares scores, and else not at all.
        """
        stored = [self.memory.trajectories(question) for question in questions.tolist()]
        scored = self._rule.scored
        of_all = iter(score([trajectory for of_question in stored for trajectory in of_question]) if scored else ())
        selected = []
        for of_question in stored:
            candidates = Candidates(of_question, tuple(islice(of_all, len(of_question))))
            chosen = self._rule.choose(candidates, self.rng)
            entropy = candidates.scores[chosen].entropy if scored else None
            replays = self.memory.count_replay(of_question[chosen].question, chosen)
            selected.append(Selected(of_question[chosen], entropy, replays))
        return selected

    def take_in(self, groups: Sequence[Group], step: int) -> TakenIn:
        """Learn what the graded groups of a step show; what they open or close counts from the next step on."""
        success = self.memory.rules.success
        rewards = np.array([row.reward for group in groups for row in group.fresh])
        self.memory.update(groups, step, collect=self.active)
        self.latch.observe(self._progress(rewards, success))
        return TakenIn(pass_rate(rewards, success), self.watch.observe(rewards))

    def _generators(self) -> dict[str, np.random.Generator]:
        return {"pool": self.pool.rng, "replay": self.rng}

    def state(self) -> ReplayState:
        """The state between two steps."""
        return ReplayState(
            values={
                "replay_open": self.latch.open,
                "pool_position": self.pool.position.tolist(),
                "rewards_seen": self.watch.state(),
                "generators": {name: rng.bit_generator.state for name, rng in self._generators().items()},
            },
            arrays={
                "count": self.memory.count,
                "retired": self.memory.retired.astype(np.uint8),
                "replays": self.memory.all_replays(),
                "pool_order": self.pool.order,
            },
            trajectories=self.memory.all_trajectories(),
        )

    def restore(self, state: ReplayState) -> None:
        """Go on from the state of a replay with the same configuration and questions; further values are ignored."""
        values, arrays = state.values, state.arrays
        self.latch.open = values["replay_open"]
        self.pool.position = np.atleast_1d(np.array(values["pool_position"], np.int64))
        self.pool.order = arrays["pool_order"].copy()
        self.watch.restore(values["rewards_seen"])
        for name, rng in self._generators().items():
            rng.bit_generator.state = values["generators"][name]
        retired = arrays["retired"].astype(bool)
        self.memory.restore(arrays["count"], retired, state.trajectories, arrays["replays"])
