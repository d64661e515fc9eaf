"""A user's own functions of replay, tried on made-up answers before a run, so that their mistakes show at once."""

from collections.abc import Sequence

import numpy as np

from exgrpo.train.experience import ExperienceConfig, MeanScore, Replay
from exgrpo.train.objective.settings import ObjectiveConfig
from exgrpo.train.records import Group, Score, Trajectory
from exgrpo.train.replayed import Weigher

STEPS = 6
QUESTIONS, BATCH = 12, 4
LONGEST = 6
"""Tokens of an answer."""


def rehearse(experience: ExperienceConfig, objective: ObjectiveConfig, samples: int, success: float) -> None:
    """Some steps of replay without a model, if any of the method's functions is a user's own.

    Args:
        experience: names the functions.
        objective: names `weigh`.
        samples: K, answers per question.
        success: a reward of at least this is a success.

    Raises:
        ConfigError: a function cannot be found, takes other arguments, raises something or gives something else.
    """
    names = (experience.admit, experience.prioritise, experience.compose, *experience.expire, objective.weigh)
    if not any(":" in name for name in names):
        return
    made_up = _MadeUp(success)
    # With all that a run has to wait for, nothing would be replayed in a few steps.
    options = experience.model_copy(update={"start_pass_rate": 0.0, "cooldown": 1, "lag": 1, "folder": None})
    replay = Replay(
        *(options, QUESTIONS, samples),
        seed=0,
        success=success,
        scale_by_std=objective.scale_by_std,
        leave_one_out=objective.baseline == "leave_one_out",
    )
    weigher = Weigher(objective, success, made_up.scores, one_update=False)
    for step in range(1, STEPS + 1):
        planned = replay.plan(BATCH, step)
        joined = replay.select(planned, made_up.mean_scores)
        groups = [
            replay.group(one.question, of_group, made_up.answers(one.question, one.fresh, step))
            for one, of_group in zip(planned, joined, strict=True)
        ]
        replay.take_in(groups, step)
        trained, _ = replay.settle(groups, BATCH, step)
        weigher(trained, [_advantages(group) for group in trained])


class _MadeUp:
    """Answers and scores that no policy has given."""

    def __init__(self, success: float) -> None:
        self.rng = np.random.default_rng(0)
        self.rewards = (success - 1, success)

    def answers(self, question: int, count: int, step: int) -> list[Trajectory]:
        return [self._answer(question, step) for _ in range(count)]

    def _answer(self, question: int, step: int) -> Trajectory:
        length = int(self.rng.integers(1, LONGEST + 1))
        response = self.rng.integers(0, 100, length).astype(np.int32)
        reward = float(self.rng.choice(self.rewards))
        key = int(self.rng.integers(1, 5))
        return Trajectory(question, response, self._log_probs(length), True, reward, step, key=key)

    def _log_probs(self, length: int) -> np.ndarray:
        return -self.rng.exponential(size=length).astype(np.float32)

    def scores(self, rows: Sequence[Trajectory]) -> list[Score]:
        return [Score(self._log_probs(len(row.response)), self._log_probs(len(row.response))) for row in rows]

    def mean_scores(self, rows: Sequence[Trajectory]) -> list[MeanScore]:
        return [MeanScore(*self.rng.exponential(size=2).tolist()) for _ in rows]


def _advantages(group: Group) -> list[float]:
    """As without a divisor."""
    counted = group.fresh if group.stored_advantage else group.rows
    mean = sum(row.net_reward for row in counted) / max(len(counted), 1)
    return [*(row.net_reward - mean for row in counted), *group.stored_advantage]
