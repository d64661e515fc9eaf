"""How far the rollout engine's policy is from the trainer's, token by token.

Both compute the same weights, but with other kernels, so the engine samples from a slightly different policy mu than
the pi that the trainer differentiates. With answers that were generated a step ahead, mu is an older policy besides.
"""

import numpy as np

from exgrpo.train.step_batch import Floats


def truncated_weight(trainer: Floats, engine: Floats, cap: float) -> Floats:
    """min(pi / mu, cap) from the log-probs of each token: truncated importance sampling.

    Args:
        trainer: [R] fp32 log-probs pi of the trainer.
        engine: [R] fp32 log-probs mu of the engine that sampled the tokens.
        cap: largest weight; it bounds the variance at the price of a bias.
    """
    return np.exp(np.minimum(trainer - engine, np.log(cap)), dtype=np.float32)


def mismatch_metrics(trainer: Floats, engine: Floats) -> dict[str, float]:
    """The difference of two policies on N tokens that the engine sampled, by their [N] fp32 log-probs.

    With d = log pi - log mu in nats and w = exp(d):

    mean, p99, max: of |d|.
    kl: mean of -d, an unbiased estimate of KL(mu || pi) that may be negative.
    kl_k3: mean of w - 1 - d, which estimates the same, is never negative and varies less.
    ess: (sum w)^2 / (N sum w^2), the effective sample size as a fraction of the N tokens.
    """
    difference = trainer.astype(np.float64) - engine
    size = np.abs(difference)
    ratio = np.exp(difference)
    return {
        "mean": float(size.mean()),
        "p99": float(np.quantile(size, 0.99, method="inverted_cdf")),
        "max": float(size.max()),
        "kl": float(-difference.mean()),
        "kl_k3": float((np.expm1(difference) - difference).mean()),
        "ess": float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
    }
