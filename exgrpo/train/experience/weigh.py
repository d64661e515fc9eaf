"""How replayed tokens enter the loss: functions `(answers, options) -> terms`; see `experience.weighing`."""

from collections.abc import Sequence

import numpy as np

from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.weighing import PRESENT, ReplayedAnswer, Weighed, WeighOptions
from exgrpo.train.reward.success import is_success

MOST = 20.0
"""Log-ratios count as at most this much, as in the kernels."""


@needs(term="shaped")
def shaped(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """f(w) = w / (w + beta), w against the policy that wrote the answer.

    ExGRPO, arXiv 2510.02245, section 3.3; LUFFY, arXiv 2504.14945.
    """
    return [Weighed(answer.log_prob) for answer in answers]


@needs(term="ratio")
def ratio(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """w against the policy that wrote the answer, without a bound (the ablation of ExGRPO without shaping)."""
    return [Weighed(answer.log_prob) for answer in answers]


@needs(term="clipped")
def clipped(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """w against the policy that wrote the answer, clipped as that of a fresh token.

    Arnal et al., arXiv 2604.08706; RePO, arXiv 2506.09340; and others.
    """
    return [Weighed(answer.log_prob) for answer in answers]


@needs(term="shaped", present="reference")
def uncorrected(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """f(w), as if the policy before this step's update had written the answer (an ablation of ExGRPO)."""
    return [Weighed(answer.present) for answer in answers if answer.present is not None]


@needs(term="clipped", present="reference")
def as_fresh(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """The clipped ratio, as if the policy before this step's update had written the answer.

    RLEP, arXiv 2507.07451: its code computes all old log-probs anew.
    """
    return [Weighed(answer.present) for answer in answers if answer.present is not None]


@needs(term="ratio", present="values")
def second_moment(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """w A, without the tokens whose ratio has gone too far in the direction of their advantage.

    A bound on the second moment of log-ratios (M2PO, arXiv 2510.01161, algorithm 1). Of the tokens with A > 0 and w > 1
    or A < 0 and w < 1, those with the largest (log w)^2 are left out until the mean of the others is at most tau. All
    replayed tokens of a step count together. (The published code caps where the paper drops, and does so for each
    micro-batch.)
    """
    log_ratio = [answer.log_ratio for answer in answers]
    onward = [of_row * np.sign(answer.advantage) > 0 for of_row, answer in zip(log_ratio, answers, strict=True)]
    squares = [of_row.astype(np.float64) ** 2 for of_row in log_ratio]
    counted = np.concatenate([of_row[far] for of_row, far in zip(squares, onward, strict=True)] or [[]])
    order = np.argsort(counted, kind="stable")
    means = np.cumsum(counted[order]) / np.arange(1, len(counted) + 1)
    # The prefix means of sorted numbers do not fall: as many as are within the bound are the longest prefix.
    counted[order] = means <= options.second_moment
    kept = np.split(counted, np.cumsum([np.count_nonzero(far) for far in onward])[:-1])
    factors = [np.ones(len(far), np.float32) for far in onward]
    for factor, far, of_row in zip(factors, onward, kept, strict=False):
        factor[far] = of_row
    return [Weighed(answer.log_prob, factor) for answer, factor in zip(answers, factors, strict=True)]


@needs(term="clipped", present="values")
def veto(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """The clipped ratio; of an answer with A < 0, nothing behind its first token with w below the trigger is learnt.

    So failures that the policy has left are not pushed further away (mu-GRPO, arXiv 2605.17570).
    """
    return [Weighed(answer.log_prob, _factor(answer, np.log(options.trigger))) for answer in answers]


def _factor(answer: ReplayedAnswer, trigger: float) -> np.ndarray | None:
    left = np.flatnonzero(answer.log_ratio < trigger)
    if answer.advantage >= 0 or not len(left):
        return None
    return (np.arange(len(answer.log_prob)) <= left[0]).astype(np.float32)


@needs(term="clipped", present="values")
def decoupled(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """pi_old / pi_past times the ratio to pi_old, clipped, with pi_old the policy before this step's update.

    Correction and trust region apart: POPO, arXiv 2606.01281, by its authors' description; decoupled PPO.
    """
    return [
        Weighed(answer.present, np.exp(np.minimum(answer.log_ratio, MOST)).astype(np.float32))
        for answer in answers
        if answer.present is not None
    ]


@needs(term="ratio")
def likelihood(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """The log-probability of a success, times the coefficient; nothing of a failure. No ratio, no advantage.

    The ratio to the policy itself is 1, and its gradient that of the log-probability. Re:Max and Re:Dr, package
    remax-rl.
    """
    return [
        Weighed(
            np.full_like(answer.log_prob, PRESENT),
            advantage=options.coefficient * is_success(answer.reward, options.success),
        )
        for answer in answers
    ]


@needs(term="ratio", present="values")
def jensen_shannon(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """Minus the coefficient times the Jensen-Shannon divergence to the policies of the stored answers.

    With samples of a past policy q and u = p / q, E_q[u log u - (u + 1) log((u + 1) / 2)] is twice the divergence, and
    -u log(2 u / (1 + u)) the gradient on each log-probability. u is that of the policy before this step's update. No
    advantage, no reward. DPH-RL, arXiv 2509.07430; as in DyJR, 2603.16157.
    """
    return [
        Weighed(
            np.full_like(answer.log_prob, PRESENT),
            _pull(np.minimum(answer.log_ratio.astype(np.float64), MOST)).astype(np.float32),
            options.coefficient,
        )
        for answer in answers
    ]


def _pull(log_u: np.ndarray) -> np.ndarray:
    """-u log(2 u / (1 + u)), by log u."""
    return -np.exp(log_u) * (np.log(2) - np.logaddexp(0, -log_u))
