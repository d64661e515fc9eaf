"""Weights of fresh tokens that correct the mismatch of trainer and engine.

With pi the trainer's policy before the step's update and mu the engine's, r = pi / mu is the ratio of a token; that of
an answer is the product over its tokens, or their geometric mean. A correction compares one of them with its bounds:

    tis             of the token             r in the bounds, else the nearer bound
    token_mask      of the token             r in the bounds, else 0
    sequence_tis    of the answer, product   r in the bounds, else the nearer bound
    sequence_mask   of the answer, product   r in the bounds, else 0
    geometric_mask  of the answer, mean      1 in the bounds, else 0

Truncated importance sampling; IcePop (arXiv 2510.18855); the same of whole answers; a filter that does not weigh.
Besides, a veto drops each answer with a token whose r is too small, and off-policy sequence masking (OPSM of
DeepSeek-V3.2, arXiv 2512.02556) each failure whose tokens the trainer finds too unlikely on average. What is dropped
has the weight 0, and counts in what losses are divided by all the same. The weights multiply advantages, so they are
constants of a step: OPSM, too, is decided once, where the paper decides in each optimiser step.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from exgrpo.kernels.objective import MAX_LOG_RATIO
from exgrpo.train.common.records import Mask
from exgrpo.train.common.step_batch import ENGINE, Doubles, Floats, Ints, StepBatch
from exgrpo.train.config.objective import CorrectionConfig, CorrectionName


class Method(NamedTuple):
    """A correction.

    Attributes:
        log_ratio: function of a batch and [T] log r of its tokens to the [T] log-ratios that are bounded.
        inside: weight within the bounds: the ratio or 1.
        outside: weight beyond them: the bound or 0.
    """

    log_ratio: Callable[[StepBatch, Floats], Floats | Doubles]
    inside: Literal["ratio", "one"]
    outside: Literal["bound", "zero"]


class Corrected(NamedTuple):
    """The weights of T tokens.

    Attributes:
        factor: [T] fp32.
        log_ratio: [T] log-ratios that are bounded.
        outside: [T] bool, True beyond the bounds, or if the answer is dropped.
    """

    factor: Floats
    log_ratio: Floats | Doubles
    outside: Mask


def _means(batch: StepBatch, values: Floats) -> Doubles:
    return batch.sums(values) / np.maximum(batch.num_tokens, 1)


def _of_answer(batch: StepBatch, log_ratio: Floats) -> Doubles:
    return batch.by_token(batch.sums(log_ratio))


METHODS: dict[CorrectionName, Method] = {
    "tis": Method(lambda _, log_ratio: log_ratio, "ratio", "bound"),
    "token_mask": Method(lambda _, log_ratio: log_ratio, "ratio", "zero"),
    "sequence_tis": Method(_of_answer, "ratio", "bound"),
    "sequence_mask": Method(_of_answer, "ratio", "zero"),
    "geometric_mask": Method(lambda batch, log_ratio: batch.by_token(_means(batch, log_ratio)), "one", "zero"),
}


def corrected(batch: StepBatch, options: CorrectionConfig) -> Corrected:
    """Return the weights of a batch's tokens.

    Args:
        batch: with `log_prob` of the trainer and `old_log_prob` of the engine; with `advantage` for OPSM.
        options: the correction.
    """
    of_token = batch.log_prob - batch.old_log_prob
    method = METHODS[options.correction]
    log_ratio = method.log_ratio(batch, of_token)
    with np.errstate(divide="ignore"):
        low, high = np.log(options.bounds)
    inside = (log_ratio >= low) & (log_ratio <= high)
    if method.inside == "one":
        factor = inside.astype(np.float32)
    elif method.outside == "bound":
        factor = np.exp(np.clip(log_ratio, low, high), dtype=np.float32)
    else:
        factor = np.exp(np.where(inside, log_ratio, -np.inf), dtype=np.float32)
    dropped = batch.by_token(_dropped(batch, of_token, options))
    return Corrected(np.where(dropped, np.float32(0), factor), log_ratio, ~inside | dropped)


def _dropped(batch: StepBatch, log_ratio: Floats, options: CorrectionConfig) -> Mask:
    """[N] True if the veto or OPSM drops the answer."""
    dropped = np.zeros(len(batch), bool)
    if options.correction_veto:
        dropped |= batch.sums(log_ratio < np.log(options.correction_veto)) > 0
    if options.opsm is not None:
        dropped |= (batch.advantage < 0) & (-_means(batch, log_ratio) > options.opsm)
    return dropped


def correct(batch: StepBatch, rows: Ints, options: CorrectionConfig) -> dict[str, float]:
    """Fill `factor` of the fresh rows whose old log-probs are the engine's.

    Args:
        batch: the step, with `log_prob` of these rows.
        rows: numbers of the rows that are trained on.
        options: the correction.

    Returns:
        dict: metrics under `correction/`, over the tokens that the policy wrote; empty without such rows.
    """
    rows = np.unique(rows)
    rows = rows[batch.fresh[rows] & (batch.old_log_probs_from[rows] == ENGINE)]
    if not len(rows):
        return {}
    part = batch.take(rows)
    result = corrected(part, options)
    batch.put(rows, factor=result.factor)
    factor = result.factor[part.response_mask].astype(np.float64)
    numbers = {
        "outside_tokens": result.outside[part.response_mask].mean(),
        "outside_answers": (part.sums(result.outside) == part.num_tokens).mean(),
        "ratio": np.exp(np.minimum(result.log_ratio[part.response_mask], MAX_LOG_RATIO), dtype=np.float64).mean(),
        "ess": factor.sum() ** 2 / (len(factor) * max((factor**2).sum(), np.finfo(np.float64).tiny)),
    }
    return {f"correction/{name}": float(value) for name, value in numbers.items()}
