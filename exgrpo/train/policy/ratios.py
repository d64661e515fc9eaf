"""How far tokens are off-policy: log-ratios counted in fixed bins, and quantiles read from the counts.

Counts of micro-batches, mini-batches and ranks are whole numbers that add up to the same sum in any order, so neither
packing nor the number of ranks changes a quantile (but for tokens which rounding moves over the edge of a bin). The
centres of the bins are equally far apart in asinh(log-ratio / NEAR_ZERO): a quantile is right to RESOLUTION / 2 of its
own size, 1 %, and to 1e-5 nats around 0, where the bin of on-policy tokens has its centre. Beyond +-20 nats, the
outermost bins count everything.
"""

import math

import numpy as np
import numpy.typing as npt
import torch

RESOLUTION = 0.02
NEAR_ZERO = 1e-3
REACH = math.ceil(math.asinh(20.0 / NEAR_ZERO) / RESOLUTION)
BINS = 2 * REACH + 1
PERCENT = (1, 10, 50, 90, 99)


def count_log_ratios(log_ratio: torch.Tensor, replayed: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """Count tokens by log-ratio, without waiting for the device.

    Args:
        log_ratio: [...] nats; NaN is left out.
        replayed: bool, which can be broadcast to that.
        active: [...] bool, the tokens that count.

    Returns:
        [2, BINS] int64 on the same device: of fresh and of replayed tokens.
    """
    place = (torch.asinh(log_ratio.double() / NEAR_ZERO) / RESOLUTION).round().clamp(-REACH, REACH) + REACH
    index = place.nan_to_num().long() + BINS * replayed
    known = (active & ~log_ratio.isnan()).long()
    counts = known.new_zeros(2 * BINS)
    return counts.index_add_(0, index.flatten(), known.flatten()).view(2, BINS)


def log_ratio_quantiles(counts: npt.NDArray[np.int64]) -> dict[str, float]:
    """q01 to q99 in nats from [BINS] counts: the least value that so many percent do not exceed. NaN of no tokens."""
    reached, total = counts.cumsum(), int(counts.sum())
    ranks = [max(1, -(-percent * total // 100)) for percent in PERCENT]
    values = NEAR_ZERO * np.sinh((np.searchsorted(reached, ranks) - REACH) * RESOLUTION)
    return {f"q{p:02}": float(value) if total else math.nan for p, value in zip(PERCENT, values, strict=True)}
