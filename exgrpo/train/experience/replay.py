"""Experience replay as one object: what a run remembers of earlier steps, and what it decides from that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from exgrpo.train.experience import rules
from exgrpo.train.experience.buckets import BUCKETS, pass_rate
from exgrpo.train.experience.memory import ExperienceMemory
from exgrpo.train.experience.plan import DelayedStart, FreshQuestions, Mixture, PlannedGroup
from exgrpo.train.experience.selection import RULES, Candidates, MeanScore
from exgrpo.train.experience.settings import ExperienceConfig, Setting
from exgrpo.train.experience.stored import Stored
from exgrpo.train.experience.supply import Supply, settles
from exgrpo.train.experience.tables import look_up
from exgrpo.train.records import Group, Trajectory
from exgrpo.train.reward.success import RewardWatch
from exgrpo.train.seeds import generator

ScoreAll = Callable[[Sequence[Trajectory]], Sequence[MeanScore]]
"""Scores trajectories under the current policy at temperature 1, in the order in which they are given."""


@dataclass(frozen=True, eq=False)
class Selected:
    """A stored answer that is replayed.

    Attributes:
        trajectory: the answer.
        entropy: its mean token entropy in nats under the current policy; None where nobody asked for scores.
        replays: how often it has been replayed, this time included.
        advantage: in the group that it was written in.
    """

    trajectory: Trajectory
    entropy: float | None
    replays: int
    advantage: float


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
        trajectories: the experience buffer, in the order in which it was filled.
    """

    values: dict[str, Any]
    arrays: dict[str, np.ndarray]
    trajectories: Stored


class Replay:
    """Experience memory, delayed start, the functions of a method and their generators.

    Arrays and generators in, decisions out: no model, no process group. Every process holds the same one and takes
    the same decisions from the same groups.

    Args:
        config: how experience is kept and drawn.
        questions: number of questions; they are known by index 0..questions-1.
        samples: K, answers per question.
        seed: of the draws.
        success: a reward of at least this is a success.
        success_option: name of the option that sets `success`, for notes.
        scale_by_std: stored advantages are divided by the standard deviation of their group.
        leave_one_out: stored advantages are against the mean of the other answers of their group.
        mixture: the sources of the questions and their weights; None: they are one source.

    Attributes:
        memory: what is stored, and which questions are retired.
        latch: whether replay has begun.
        watch: whether rewards fit `success`.
        pool: the fresh questions.
        rng: draws what is replayed.

    Raises:
        ConfigError: a function of the configuration cannot be found.
    """

    def __init__(
        self,
        config: ExperienceConfig,
        questions: int,
        samples: int,
        seed: int,
        *,
        success: float = 1.0,
        success_option: str = "success",
        scale_by_std: bool = False,
        leave_one_out: bool = False,
        mixture: Mixture | None = None,
    ) -> None:
        self.config = config
        self.setting = Setting(config, samples, success, scale_by_std, leave_one_out)
        self.memory = ExperienceMemory(questions, self.setting)
        self.latch = DelayedStart(config.start_pass_rate)
        self.watch = RewardWatch(success, success_option)
        self.pool = FreshQuestions(questions, generator(seed, "fresh questions"), mixture)
        self.rng = generator(seed, "replay")
        self._progress = look_up(BUCKETS, config.bucket_by, "bucket_by").progress
        self._rule = look_up(RULES, config.trajectory, "trajectory rule")
        self._prioritise = rules.find("prioritise", config.prioritise)
        self._compose = rules.find("compose", config.compose)
        self._settle = settles(self._compose)

    @property
    def active(self) -> bool:
        """Whether the next step replays, and stores what it collects."""
        return self.latch.open and self.config.ratio > 0

    @property
    def finished(self) -> bool:
        """Whether every question is retired."""
        return bool(self.memory.retired.all())

    @property
    def settles(self) -> bool:
        """Whether what is trained on is decided after the answers are graded."""
        return self._settle is not None

    def _supply(self, batch: int, step: int) -> Supply:
        ratio = self.config.ratio if self.active else 0.0
        return Supply(step, batch, ratio, self.setting, self.memory, self.pool, self._prioritise, self.rng)

    def plan(self, batch: int, step: int) -> list[PlannedGroup]:
        """The groups of a step: of `batch` questions, or fewer where too few are left unretired."""
        return list(self._compose(self._supply(batch, step)))

    def more(self, wanted: int, step: int, without: Sequence[int]) -> list[PlannedGroup]:
        """Groups of fresh answers to at most `wanted` further questions, which are not `without`."""
        return self._supply(wanted, step).fresh(wanted, without)

    def select(self, planned: Sequence[PlannedGroup], score: ScoreAll) -> list[list[Selected]]:
        """The stored answers that join each of the planned groups; each of them counts as a replay.

        Args:
            planned: groups of a step.
            score: is called once, with all candidates, if the rule compares scores and has to choose, else not at all.
        """
        table = self.memory.table
        stored = [table.of_question(group.question) if group.choose else [] for group in planned]
        candidates = [[table.trajectory(row) for row in rows] for rows in stored]
        scored = self._rule.scored and any(stored)
        of_all = iter(score([one for of_group in candidates for one in of_group]) if scored else ())
        selected = []
        for group, rows, of_group in zip(planned, stored, candidates, strict=True):
            scores = tuple(islice(of_all, len(rows)))
            chosen = self._choose(group.choose, of_group, scores)
            entropies = [scores[i].entropy for i in chosen] if scores else None
            selected.append([*self._join([rows[i] for i in chosen], entropies), *self._join(group.rows)])
        return selected

    def _choose(self, wanted: int, candidates: Sequence[Trajectory], scores: Sequence[MeanScore]) -> list[int]:
        """Which candidates the rule takes, one after the other."""
        left, chosen = list(range(len(candidates))), []
        for _ in range(wanted):
            of_left = Candidates([candidates[i] for i in left], [scores[i] for i in left] if scores else ())
            chosen.append(left.pop(self._rule.choose(of_left, self.rng)))
        return chosen

    def _join(self, rows: Sequence[int], entropies: Sequence[float] | None = None) -> list[Selected]:
        """Stored answers that are replayed, by their rows."""
        table, numbers = self.memory.table, np.array(rows, np.int64)
        columns = (
            map(table.trajectory, rows),
            [None] * len(rows) if entropies is None else entropies,
            table.replayed(numbers).tolist(),
            table.values("advantage", numbers).tolist(),
        )
        return [Selected(*of_row) for of_row in zip(*columns, strict=True)]

    def group(self, question: int, joined: Sequence[Selected], fresh: Sequence[Trajectory] = ()) -> Group:
        """A group of fresh and stored answers, with advantages as the options say."""
        stored = self.config.advantage == "stored"
        return Group(
            question,
            tuple(fresh),
            tuple(one.trajectory for one in joined),
            stored_advantage=tuple(one.advantage for one in joined) if stored else (),
        )

    def settle(self, groups: Sequence[Group], batch: int, step: int) -> tuple[list[Group], list[Selected]]:
        """What is trained on of the graded groups of a step, perhaps nothing, and the stored answers that came late."""
        if self._settle is None:
            return list(groups), []
        settled = self._settle(groups, self._supply(batch, step))
        late = self._join([row for group in settled if isinstance(group, PlannedGroup) for row in group.rows])
        joined = iter(late)
        trained = [
            group if isinstance(group, Group) else self.group(group.question, list(islice(joined, len(group.rows))))
            for group in settled
        ]
        return trained, late

    def take_in(self, groups: Sequence[Group], step: int) -> TakenIn:
        """Learn what the graded groups of a step show; what they open or close counts from the next step on."""
        success = self.setting.success
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
            arrays={**self.memory.arrays(), "pool_order": self.pool.order},
            trajectories=self.memory.all_trajectories(),
        )

    def restore(self, state: ReplayState) -> None:
        """Go on from the state of a replay with the same configuration and questions; further values are ignored."""
        values, arrays = state.values, state.arrays
        self.latch.open = values["replay_open"]
        self.pool.position = np.array(values["pool_position"], np.int64)
        self.pool.order = arrays["pool_order"].copy()
        self.watch.restore(values["rewards_seen"])
        for name, rng in self._generators().items():
            rng.bit_generator.state = values["generators"][name]
        self.memory.restore(arrays, state.trajectories)


def numbers_of(planned: Sequence[PlannedGroup]) -> list[list[int]]:
    """Planned groups as plain numbers, for `planned_from`."""
    return [[group.question, group.fresh, group.choose, *group.rows] for group in planned]


def planned_from(numbers: Sequence[Sequence[int]]) -> list[PlannedGroup]:
    """The planned groups of `numbers_of`."""
    return [PlannedGroup(question, fresh, choose, tuple(rows)) for question, fresh, choose, *rows in numbers]
