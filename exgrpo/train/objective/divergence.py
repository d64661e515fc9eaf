"""Estimates of the KL divergence to a reference policy, from the tokens that the policy wrote.

With d = log reference - log policy of a token, the means of k1 and k3 are the divergence, and that of k2 is it up to
third order (Schulman, "Approximating KL divergence", 2020). As terms of a loss they differ in their gradients, on
tokens that the policy has just written: that of k2 is the gradient of the divergence; that of k3 is the one of the
reverse divergence; the mean of k1's is 0, and k1 moves the policy by its noise alone. Multiplied by the importance
ratio, k1 and k3 have the gradient of the divergence, whichever policy wrote the tokens (DeepSeek-V3.2, arXiv
2512.02556).
"""

from collections.abc import Callable

import torch
from torch import Tensor

MOST = 20.0
"""d counts as at most this much in e^d, as log-ratios do in the kernels."""

ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": torch.neg,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: torch.expm1(d.clamp(max=MOST)) - d,
}


def divergence(estimator: str, log_prob: Tensor, reference: Tensor) -> Tensor:
    """The estimate of each token, with its gradient in `log_prob`.

    Args:
        estimator: a key of `ESTIMATORS`.
        log_prob: of the policy, in nats, any shape.
        reference: of the reference, the same shape. Constant.
    """
    return ESTIMATORS[estimator](reference - log_prob)
