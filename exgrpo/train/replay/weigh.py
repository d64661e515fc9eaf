"""Terms of replayed tokens in the loss: functions `(batch, options) -> Weighed`; see `exgrpo.train.replay.contract`."""

import numpy as np

from exgrpo.train.common.functions import needs
from exgrpo.train.common.step_batch import Doubles, Floats, StepBatch
from exgrpo.train.common.success import is_success
from exgrpo.train.config.objective import BOUNDS, MethodOptions
from exgrpo.train.replay.contract import PRESENT, Weighed

MOST = 20.0
"""Log-ratios count as at most this much, as in the kernels."""


@needs(term="shaped")
def shaped(batch: StepBatch, options: MethodOptions) -> Weighed:
    """f(w) = w / (w + beta), w against the policy that wrote the answer.

    ExGRPO, arXiv 2510.02245, section 3.3; LUFFY, arXiv 2504.14945.
    """
    return Weighed(batch.old_log_prob)


@needs(term="ratio")
def ratio(batch: StepBatch, options: MethodOptions) -> Weighed:
    """w against the policy that wrote the answer, without a bound (the ablation of ExGRPO without shaping)."""
    return Weighed(batch.old_log_prob)


@needs(term="clipped")
def clipped(batch: StepBatch, options: MethodOptions) -> Weighed:
    """w against the policy that wrote the answer, clipped as that of a fresh token.

    Arnal et al., arXiv 2604.08706; RePO, arXiv 2506.09340; and others.
    """
    return Weighed(batch.old_log_prob)


@needs(term="shaped", present="reference")
def uncorrected(batch: StepBatch, options: MethodOptions) -> Weighed:
    """f(w), as if the policy before this step's update had written the answer (an ablation of ExGRPO)."""
    return Weighed(batch.log_prob)


@needs(term="clipped", present="reference")
def as_fresh(batch: StepBatch, options: MethodOptions) -> Weighed:
    """The clipped ratio, as if the policy before this step's update had written the answer.

    RLEP, arXiv 2507.07451: its code computes all old log-probs anew.
    """
    return Weighed(batch.log_prob)


@needs(term="ratio", present="values")
def second_moment(batch: StepBatch, options: MethodOptions) -> Weighed:
    """w A, without the tokens whose ratio has gone too far in the direction of their advantage.

    A bound on the second moment of log-ratios (M2PO, arXiv 2510.01161, algorithm 1). Of the tokens with A > 0 and w > 1
    or A < 0 and w < 1, those with the largest (log w)^2 are left out until the mean of the others is at most tau. All
    replayed tokens of a step count together. (The published code caps where the paper drops, and does so for each
    micro-batch.)
    """
    log_ratio = _log_ratio(batch)
    onward = np.flatnonzero(log_ratio * np.sign(batch.by_token(batch.advantage)) > 0)
    squares = log_ratio[onward].astype(np.float64) ** 2
    order = np.argsort(squares, kind="stable")
    means = np.cumsum(squares[order]) / np.arange(1, len(squares) + 1)
    factor = np.ones_like(log_ratio)
    # The prefix means of sorted numbers do not fall: as many as are within the bound are the longest prefix.
    factor[onward[order]] = means <= options.objective.second_moment
    return Weighed(batch.old_log_prob, factor)


@needs(term="clipped", present="values")
def veto(batch: StepBatch, options: MethodOptions) -> Weighed:
    """The clipped ratio; for A < 0, all tokens after the first one with w < `trigger` are masked.

    So failures that the policy has left are not pushed further away (mu-GRPO, arXiv 2605.17570).
    """
    left = (_log_ratio(batch) < np.log(options.objective.trigger)) & batch.by_token(batch.advantage < 0)
    before = np.concatenate([[0], np.cumsum(left)])
    return Weighed(batch.old_log_prob, (before[:-1] == batch.by_token(before[batch.start[:-1]])).astype(np.float32))


@needs(term="clipped", present="values")
def decoupled(batch: StepBatch, options: MethodOptions) -> Weighed:
    """pi_old / pi_past times the ratio to pi_old, clipped, with pi_old the policy before this step's update.

    Correction and trust region apart: POPO, arXiv 2606.01281, by its authors' description; decoupled PPO.
    """
    return Weighed(batch.log_prob, np.exp(np.minimum(_log_ratio(batch), MOST)).astype(np.float32))


@needs(term="clipped", present="values")
def truncated(batch: StepBatch, options: MethodOptions) -> Weighed:
    """As `decoupled`, with pi_old / pi_past at most 2: truncated importance sampling (SU-01, arXiv 2605.13301)."""
    return Weighed(batch.log_prob, np.exp(np.minimum(_log_ratio(batch), np.log(BOUNDS["tis"][1]))).astype(np.float32))


@needs(term="ratio")
def likelihood(batch: StepBatch, options: MethodOptions) -> Weighed:
    """The log-probability of a success, times the coefficient; nothing of a failure. No ratio, no advantage.

    The ratio to the policy itself is 1, and its gradient that of the log-probability. Re:Max and Re:Dr, package
    remax-rl.
    """
    right = is_success(batch.reward, options.success)
    return Weighed(
        np.full_like(batch.old_log_prob, PRESENT), advantage=np.where(right, options.objective.coefficient, 0.0)
    )


@needs(term="ratio", present="values")
def jensen_shannon(batch: StepBatch, options: MethodOptions) -> Weighed:
    """Minus the coefficient times the Jensen-Shannon divergence to the policies of the stored answers.

    With samples of a past policy q and u = p / q, E_q[u log u - (u + 1) log((u + 1) / 2)] is twice the divergence, and
    -u log(2 u / (1 + u)) the gradient on each log-probability. u is that of the policy before this step's update. No
    advantage, no reward. DPH-RL, arXiv 2509.07430; as in DyJR, 2603.16157.
    """
    factor = _pull(np.minimum(_log_ratio(batch).astype(np.float64), MOST)).astype(np.float32)
    return Weighed(
        np.full_like(batch.old_log_prob, PRESENT), factor, np.full(len(batch), options.objective.coefficient)
    )


def _log_ratio(batch: StepBatch) -> Floats:
    """[T] log of the present policy over the one that wrote the answer."""
    return batch.log_prob - batch.old_log_prob


def _pull(log_u: Doubles) -> Doubles:
    """-u log(2 u / (1 + u)), by log u."""
    return -np.exp(log_u) * (np.log(2) - np.logaddexp(0, -log_u))
