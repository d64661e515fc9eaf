"""Answers as engines give them, what a policy says of their tokens, and what is stored of them. R response tokens."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Behaviour = Literal["trainer", "engine", "unknown"]


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled answer.

    Attributes:
        response: [R] token ids. A finished answer ends with the EOS token or with the token that completes a stop
            string (and may hold more text behind it): the policy wrote that token, so it is scored, trained on and
            stored as all others. Before it there is neither of them.
        finished: False where the answer was cut at the length limit.
        log_prob: [R] fp32, the engine's own log-probability of each token under the policy that it sampled from, at the
            sampling temperature; or None where it has none.
        entropy: [R] fp32, the entropy in nats of that policy where the token was sampled; or None.
        written: [R], whether the policy wrote the token; None: all of them. Of observations, log-probs and entropies
            are 0; before one, the response may hold EOS tokens and stop strings.
    """

    response: TokenIds
    finished: bool
    log_prob: npt.NDArray[np.float32] | None = None
    entropy: npt.NDArray[np.float32] | None = None
    written: Mask | None = None


@dataclass(frozen=True, eq=False)
class Score:
    """The T response tokens of a batch under a policy; 0 of observations.

    Attributes:
        log_prob: [T] fp32 log-probability of each token, at the temperature that was asked for.
        entropy: [T] fp32 entropy in nats where the token was predicted, at the same temperature.
    """

    log_prob: npt.NDArray[np.float32]
    entropy: npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A graded answer with the log-probabilities of the policy that wrote it.

    Attributes:
        question: index of its question.
        response: [R] token ids (never text: re-encoding text would misalign `log_prob`).
        log_prob: [R] fp32 of the policy that wrote it, at the rollout temperature (pi_past once it is replayed).
        finished: whether it ends with EOS or a stop string, as of a `Rollout`.
        reward: what the verifier gave.
        step: training step in which it was written.
        behaviour: who computed `log_prob`: the trainer, before that step's update, or the rollout engine, in sampling;
            unknown: nobody, as of text from elsewhere. `log_prob` is 0 then: the writer counts as certain.
        key: of the solution that it gives: answers that differ only in form have the same one; 0: none.
        penalty: what its length takes from its reward in advantages; whether it is a success, the reward alone decides.
        written: [R], whether the policy wrote the token, as of a `Rollout`.
    """

    question: int
    response: TokenIds
    log_prob: npt.NDArray[np.float32]
    finished: bool
    reward: float
    step: int
    behaviour: Behaviour = "trainer"
    key: int = 0
    penalty: float = 0.0
    written: Mask | None = None

    @property
    def observed(self) -> Mask | None:
        """[R] whether an environment wrote the token; None: it wrote none."""
        return None if self.written is None else ~self.written

    def own(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Those of [R] values that belong to tokens of the policy."""
        return values if self.written is None else values[self.written]


@dataclass(frozen=True, eq=False)
class Group:
    """The answers to one question that share one mean reward: K fresh ones, or K-1 and a replayed success.

    Attributes:
        question: index of the question.
        fresh: answers of this step.
        replayed: from the experience buffer.
        scores: of each fresh answer under the trainer's policy before the step's update, at the rollout temperature.
            Rows whose log-probs are the engine's need them; empty where nobody computed them.
        stored_advantage: of each replayed answer, in the group that it was written in; empty: replayed answers count in
            this group's mean, and have its advantages.
    """

    question: int
    fresh: tuple[Trajectory, ...]
    replayed: tuple[Trajectory, ...] = ()
    scores: tuple[Score, ...] = ()
    stored_advantage: tuple[float, ...] = ()

    @property
    def rows(self) -> tuple[Trajectory, ...]:
        """All trajectories; the replayed ones are the last."""
        return (*self.fresh, *self.replayed)
