"""Scores of fresh answers under the policy before the update, computed no more often than they must be."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from exgrpo.train.config import Config
from exgrpo.train.policy.batch import TokenSequence
from exgrpo.train.policy.mismatch import Floats
from exgrpo.train.policy.zero3 import Policy
from exgrpo.train.records import Rollout, Score

EXACT = 1e-5
"""Nats. An engine whose log-probs are as near to the trainer's on average knows the trainer's scores: a
ratio is then wrong by a hundred thousandth, where it is clipped at a fifth."""
SAMPLED = 1 / 32
"""Share of a step's answers that the trainer scores itself to find out, at least two."""


@dataclass(frozen=True, eq=False)
class FreshScores:
    """How the policy before the update sees the fresh answers of a step.

    Attributes:
        scores: of all of them. Where only the update will know them, log-probs are inf, which stands for the policy
            itself, and entropies are no number.
        known: whether they are known.
        scored: what the trainer has read for that.
        compared: fp32 log-probs of the trainer and of the engine, of the tokens of each answer that both have scored.
    """

    scores: list[Score]
    known: bool
    scored: Sequence[TokenSequence]
    compared: list[tuple[Floats, Floats]]


class FreshScorer:
    """Takes scores from where they are known: the engine, the only optimiser step, or a pass of their own.

    Args:
        config: the run.
        policy: scores.
        all_trained: whether the update reads every fresh answer.
    """

    def __init__(self, config: Config, policy: Policy, *, all_trained: bool = True) -> None:
        self.policy = policy
        self.temperature = config.rollout.temperature
        self.same_arithmetic = config.policy.dtype == "fp32"
        # The only optimiser step sees the policy before it, and where every row has a gradient it reads all of them.
        # Weights by the engine's log-probs, and plans of steps ahead, need the scores before.
        self.own_forward = (
            all_trained
            and config.optimizer.steps_per_batch == 1
            and config.objective.entropy_coef > 0
            and config.objective.train_on == "all"
            and not config.objective.overlong_filter
            and config.rollout.behaviour == "trainer"
            and not config.rollout.ahead
        )

    def before(self, sequences: Sequence[TokenSequence], rollouts: Sequence[Rollout]) -> FreshScores:
        """Scores before the update, of the answers as the policy reads them and as the engine gave them.

        An engine with the trainer's arithmetic has computed them in sampling. Whether it has is looked at in each step,
        on answers from all over the step.
        """
        of_engine = [
            Score(rollout.log_prob, rollout.entropy)
            for rollout in rollouts
            if rollout.log_prob is not None and rollout.entropy is not None
        ]
        if self.same_arithmetic and len(of_engine) == len(rollouts):
            places = np.linspace(0, len(rollouts) - 1, max(2, int(SAMPLED * len(rollouts)))).round().astype(int)
            sampled = [sequences[i] for i in places]
            compared = _compared(self.policy.score(sampled, self.temperature), [rollouts[i] for i in places])
            if np.abs(np.concatenate([ours - theirs for ours, theirs in compared])).mean() <= EXACT:
                return FreshScores(of_engine, True, sampled, compared)
        if self.own_forward:
            return FreshScores([_present(len(rollout.response)) for rollout in rollouts], False, (), [])
        return self._by_a_pass(sequences, rollouts)

    def after(
        self, of_update: Mapping[int, Score], sequences: Sequence[TokenSequence], rollouts: Sequence[Rollout]
    ) -> FreshScores:
        """Scores that were not known before the update.

        Args:
            of_update: what the only optimiser step has computed, by `id` of the response; empty where there was none.
            sequences: all fresh answers.
            rollouts: the same.
        """
        if not of_update:
            return self._by_a_pass(sequences, rollouts)  # under the same weights
        scores = [of_update[id(rollout.response)] for rollout in rollouts]
        return FreshScores(scores, True, (), _compared(scores, rollouts))

    def _by_a_pass(self, sequences: Sequence[TokenSequence], rollouts: Sequence[Rollout]) -> FreshScores:
        scores = self.policy.score(sequences, self.temperature)
        return FreshScores(scores, True, sequences, _compared(scores, rollouts))


def _compared(scores: Sequence[Score], rollouts: Sequence[Rollout]) -> list[tuple[Floats, Floats]]:
    return [
        (rollout.own(score.log_prob), rollout.own(rollout.log_prob))
        for score, rollout in zip(scores, rollouts, strict=True)
        if rollout.log_prob is not None
    ]


def _present(length: int) -> Score:
    return Score(np.full(length, math.inf, np.float32), np.full(length, math.nan, np.float32))
