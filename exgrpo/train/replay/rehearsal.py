"""Rehearsal of a method: its functions run on made-up answers before a run, so that errors in them show at once."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from exgrpo.train.common.records import Rollout
from exgrpo.train.common.step_batch import SCORES, Floats, StepBatch
from exgrpo.train.replay import MeanScores, MethodOptions, PlannedGroup, Replay
from exgrpo.train.replay.groups import fill_advantages
from exgrpo.train.replay.rules import ImportanceWeighting

STEPS, QUESTIONS, BATCH = 6, 12, 4
LONGEST = 6
"""Tokens of an answer."""


def rehearse(method: MethodOptions) -> None:
    """Run some steps of replay without a model.

    Args:
        method: names the functions.

    Raises:
        ConfigError: a function cannot be found, takes other arguments, raises something, gives something else, or does
            not go with the others.
    """
    made_up, experience = _MadeUp(method.success), method.experience
    # With all that a run has to wait for, and shares of so small a batch, nothing would be replayed in a few steps.
    soon = {"start_pass_rate": 0.0, "cooldown": 1, "lag": 1, "hard": 1.0, "band": (0.0, 1.0), "folder": None}
    shares = {name: max(share, 0.5) for name in ("ratio", "repeat") if (share := getattr(experience, name))}
    options = experience.model_copy(update={**soon, **shares})
    method = replace(method, experience=options)
    replay = Replay(method, QUESTIONS, seed=0)
    importance_weighting = ImportanceWeighting(method, made_up.log_probs, one_update=False)
    for step in range(1, STEPS + 1):
        planned = replay.plan(BATCH, step)
        if not planned:  # all questions are retired
            return
        stored = replay.select(planned, made_up.mean_scores)
        batch = made_up.answers(planned, step).append_rows(stored)
        replay.store(batch, step)
        batch = replay.settle(batch, BATCH, step)
        fill_advantages(batch, method.objective)
        importance_weighting(batch)


class _MadeUp:
    def __init__(self, success: float) -> None:
        self.rng = np.random.default_rng(0)
        self.rewards = (success - 1, success)

    def answers(self, planned: Sequence[PlannedGroup], step: int) -> StepBatch:
        counts = [group.fresh for group in planned]
        rows = sum(counts)
        lengths = self.rng.integers(1, LONGEST + 1, rows)
        rollouts = [Rollout(self.rng.integers(0, 100, length).astype(np.int32), finished=True) for length in lengths]
        batch = StepBatch.from_rollouts([group.question for group in planned], counts, rollouts)
        batch.fill(
            prompt=[np.array([group.question], np.int32) for group in planned],
            reward=self.rng.choice(self.rewards, rows),
            key=self.rng.integers(1, 5, rows),
            penalty=np.zeros(rows),
            step=np.full(rows, step),
            old_log_probs_from=np.zeros(rows),
            text=[""] * rows,
            parts=[{} for _ in range(rows)],
            given=np.repeat([group.given for group in planned], counts),
            **{name: self.log_probs(batch) for name in SCORES},
        )
        return batch

    def log_probs(self, batch: StepBatch) -> Floats:
        return -self.rng.exponential(size=len(batch.token)).astype(np.float32)

    def mean_scores(self, batch: StepBatch) -> MeanScores:
        return MeanScores(*self.rng.exponential(size=(2, len(batch))))
