"""The terms of replayed answers in the loss, by the function `objective.weigh`."""

from collections.abc import Callable, Sequence

import numpy as np

from exgrpo.train.config import Config
from exgrpo.train.experience import rules
from exgrpo.train.experience.weighing import (
    PRESENT,
    Floats,
    ReplayedAnswer,
    Weighed,
    WeighOptions,
    declared,
)
from exgrpo.train.objective.settings import ObjectiveConfig
from exgrpo.train.records import Group, Score, Trajectory

ScoreRows = Callable[[Sequence[Trajectory]], Sequence[Score]]
"""Trajectories to their scores under the policy before the update, at the rollout temperature."""


class Weigher:
    """Asks the function for the terms of a step's replayed answers.

    Args:
        objective: names the function, and its options.
        success: a reward of at least this is a success.
        one_update: whether all of a step's answers are in one optimiser step, so that the update itself sees the policy
            before it.
        score: asks the policy, where the function needs it.

    Attributes:
        term: in the loss, of all replayed tokens.

    Raises:
        ConfigError: there is no such function, or it declares what there is not.
    """

    def __init__(
        self,
        objective: ObjectiveConfig,
        success: float,
        score: ScoreRows,
        *,
        one_update: bool,
    ) -> None:
        self._weigh = rules.find("weigh", objective.weigh)
        self.term, self._present = declared(self._weigh, objective.weigh)
        self._one_update = one_update
        self._score = score
        self._options = WeighOptions(
            success=success,
            second_moment=objective.second_moment,
            trigger=objective.trigger,
            coefficient=objective.coefficient,
        )

    @classmethod
    def of_run(cls, config: Config, score: ScoreRows) -> "Weigher":
        """With the options of a run."""
        return cls(config.objective, config.reward.success, score, one_update=config.optimizer.steps_per_batch == 1)

    def __call__(self, groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> list[Weighed]:
        """The terms of all replayed answers of the groups that are trained on, in their order.

        Raises:
            ConfigError: the function gives something else, or numbers that would spoil the update.
        """
        rows = [row for group in groups for row in group.replayed]
        of_rows = [
            advantage
            for group, of_group in zip(groups, advantages, strict=True)
            for advantage in of_group[len(group.fresh) :]
        ]
        answers = [
            ReplayedAnswer(row.log_prob, advantage, row.reward, present)
            for row, advantage, present in zip(rows, of_rows, self._log_probs(rows), strict=True)
        ]
        return list(self._weigh(answers, self._options))

    def _log_probs(self, rows: Sequence[Trajectory]) -> Sequence[Floats | None]:
        """[R] of each answer under the policy before the update, where the function needs them."""
        if self._present is None or not rows:
            return [None] * len(rows)
        if self._present == "reference" and self._one_update:
            return [np.full_like(row.log_prob, PRESENT) for row in rows]
        return [score.log_prob for score in self._score(rows)]
