"""Sample tokens from logits with independent random numbers per answer. Shapes: N rows, V tokens of the vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from exgrpo.train.common.records import AllowedTokens
from exgrpo.train.rollout.engine import Sampling

_AHEAD = 64
"""Number of positions whose random numbers are generated at once."""
_BLOCK = 256
"""Block size of the two-level sum over the vocabulary."""


class Noise:
    """Uniform random numbers in [0, 1) by answer and position, counter-based (Philox).

    They depend only on an answer's key, which is its prompt's seed (below 2^64) and its index among the samples, and on
    the position: not on other rows or on the process.
    """

    def __init__(self, keys: Sequence[tuple[int, int]]) -> None:
        self._streams = [
            np.random.Generator(np.random.Philox(key=seed, counter=sample << 192)) for seed, sample in keys
        ]
        self._numbers = np.empty((len(keys), _AHEAD))

    def at(self, position: int, answers: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the numbers of some answers at a position; to be called for positions 0, 1, 2, ... in order."""
        if position % _AHEAD == 0:
            for answer in answers:
                self._numbers[answer] = self._streams[answer].random(_AHEAD)
        return self._numbers[answers, position % _AHEAD]


@dataclass(frozen=True, eq=False)
class Drawn:
    """Sampled tokens.

    Attributes:
        token: [N] int64.
        log_prob: [N] fp32 log-probability in the distribution that was sampled from.
        entropy: [N] fp32 entropy of that distribution in nats.
        allowed_tokens: [N] ids with a probability above 0 in it; None: not requested.
    """

    token: torch.Tensor
    log_prob: torch.Tensor
    entropy: torch.Tensor
    allowed_tokens: AllowedTokens | None = None


def draw(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> Drawn:
    """Sample a token per row by inverting the cumulative distribution, after temperature, top-k, top-p and min-p.

    Args:
        logits: [N, V].
        uniform: [N] in [0, 1).
        sampling: temperature, `top_k`, `top_p`, `min_p` and `allowed_tokens`.
    """
    logits = logits.float() / sampling.temperature
    if sampling.top_k:
        logits = TopKLogitsWarper(sampling.top_k)(None, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(None, logits)
    if sampling.min_p > 0:
        logits = MinPLogitsWarper(sampling.min_p)(None, logits)
    log_prob = torch.log_softmax(logits, dim=-1)
    probability = log_prob.exp()
    token = invert(probability, uniform)[:, None]
    return Drawn(
        token=token.squeeze(1),
        log_prob=log_prob.gather(1, token).squeeze(1),
        entropy=torch.special.entr(probability).sum(-1),
        allowed_tokens=_left(logits) if sampling.allowed_tokens else None,
    )


def _left(logits: torch.Tensor) -> AllowedTokens:
    """Return the ids allowed by [N, V] logits; a row that allows all gets an empty set, which means all."""
    inside = logits > -torch.inf
    inside &= ~inside.all(1, keepdim=True)
    return AllowedTokens.from_sizes(inside.sum(1).cpu().numpy(), inside.nonzero()[:, 1].int().cpu().numpy())


def invert(probability: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return [N] int64 tokens by inverting the cumulative distribution; never a token of probability 0.

    Sums blocks first: a running sum over a large vocabulary would be slow and accumulate rounding errors.

    Args:
        probability: [N, V].
        uniform: [N] in [0, 1).
    """
    rows, vocabulary = probability.shape
    blocks = -(-vocabulary // _BLOCK)
    padded = torch.nn.functional.pad(probability, (0, blocks * _BLOCK - vocabulary)).view(rows, blocks, _BLOCK)
    block, rest = _find(padded.sum(-1, dtype=torch.float64), uniform.double())
    inside = padded[torch.arange(rows, device=block.device), block].double()
    token, _ = _find(inside, rest)
    return block * _BLOCK + token


def _find(weight: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert the running sum of [N, W] weights: index of the weight, and the fraction within that weight."""
    reached = weight.cumsum(-1)
    wanted = (uniform * reached[:, -1])[:, None]
    last = weight.shape[-1] - 1 - (weight.flip(-1) > 0).int().argmax(-1, keepdim=True)
    place = torch.minimum(torch.searchsorted(reached, wanted, right=True), last)
    share = weight.gather(1, place)
    rest = ((wanted - (reached.gather(1, place) - share)) / share).clamp(0, 1)
    return place.squeeze(1), rest.squeeze(1)
