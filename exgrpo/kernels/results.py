"""What the public functions return."""

from typing import NamedTuple

from torch import Tensor


class LogProb(NamedTuple):
    """Per-token results of :func:`exgrpo.kernels.linear_log_prob`.

    Attributes:
        log_prob: log-probability of each target in nats, shaped like ``target``; 0 at ignored positions.
        entropy: Shannon entropy of each token's distribution over the whole vocabulary in nats, same shape.
    """

    log_prob: Tensor
    entropy: Tensor


class PolicyLoss(NamedTuple):
    """Results of :func:`exgrpo.kernels.linear_policy_loss` and :func:`exgrpo.kernels.policy_loss`.

    Every per-token tensor is detached, in the dtype of the loss and shaped like ``target`` (``log_prob``),
    and is 0 at positions that are left out.

    Attributes:
        loss: differentiable scalar.
        log_prob: log-probability of each token under the current policy, in nats.
        entropy: entropy of each token's distribution in nats (0 where none was given to ``policy_loss``).
        ratio: importance ratio, current over behaviour policy, before clipping and shaping.
        clipped: 1 where clipping has cut the token's gradient off, else 0.
    """

    loss: Tensor
    log_prob: Tensor
    entropy: Tensor
    ratio: Tensor
    clipped: Tensor
