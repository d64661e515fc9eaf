"""Terms of replayed answers in the loss, by the function `objective.weigh`."""

from collections.abc import Callable

import numpy as np

from exgrpo.train.common.functions import Needs
from exgrpo.train.common.step_batch import Floats, StepBatch
from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.config.options import Config
from exgrpo.train.replay import rules
from exgrpo.train.replay.contract import PRESENT, WeighFunction

ScoreRows = Callable[[StepBatch], Floats]
"""Log-probs [T] of a batch under the policy before the update, at the rollout temperature."""


class ImportanceWeighting:
    """Compute the terms of replayed answers in the loss, by `objective.weigh`.

    Args:
        options: names the function, and its options.
        one_update: True if all of a step's answers are in one optimiser step, so that the update itself sees the
            policy before it.
        score: scores rows under the policy, where the function needs it.

    Attributes:
        term: term of all replayed tokens in the loss.

    Raises:
        ConfigError: there is no such function, or its declaration is wrong.
    """

    def __init__(self, options: MethodOptions, score: ScoreRows, *, one_update: bool) -> None:
        self._function: WeighFunction = rules.find("weigh", options.objective.weigh)
        self._needs = Needs.of(self._function)
        self.term = self._needs.term
        self._one_update = one_update
        self._score = score
        self._options = options

    @classmethod
    def from_config(cls, config: Config, score: ScoreRows) -> "ImportanceWeighting":
        """Return it with the options of a run."""
        return cls(config.method, score, one_update=config.optimizer.steps_per_batch == 1)

    def __call__(self, batch: StepBatch) -> None:
        """Fill `ratio_log_prob`, `factor` and `advantage` of the replayed rows that are trained on.

        Raises:
            MethodError: a user's function returns something else, or numbers that would spoil the update.
        """
        rows = batch.rows_of(batch.trained)
        rows = rows[batch.replayed[rows]]
        if not len(rows):
            return
        terms = self._function(self._read(batch.take(rows)), self._options)
        batch.put(rows, ratio_log_prob=terms.reference)
        if terms.factor is not None:
            batch.put(rows, factor=terms.factor)
        if terms.advantage is not None:
            batch.advantage[rows] = terms.advantage

    def _read(self, replayed: StepBatch) -> StepBatch:
        """Fill the log-probs of the policy before the update where the function needs them, and only there."""
        replayed = replayed.without("log_prob", "entropy")
        if self._needs.present == "reference" and self._one_update:
            replayed.fill(log_prob=np.full(len(replayed.token), PRESENT))
        elif self._needs.present:
            replayed.fill(log_prob=self._score(replayed))
        return replayed
