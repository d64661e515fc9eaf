"""Softmax statistics of a chunk of logits, and the gradient with respect to the logits, both in place.

With a the row's largest logit, d_v = (z_v - a) / tau, y the target and e_y = exp(d_y), take the target out of the
sums: S = sum_{v != y} exp(d_v). Then, with Z = S + e_y and U = (sum_v exp(d_v) d_v) / Z,

    log p_y = d_y - log Z        p_y - 1 = -S / Z        H = log Z - U        log p_v + H = d_v - U

Z is computed as 1 + (S + expm1(d_y)). Where the target has the largest logit, which is every row with p_y > 1/2,
d_y = 0 and this is the softmax anchored at the target, log p_y = -log1p(S): exact to the last bit however close p_y
is to 1. Elsewhere S holds the row's largest term and is at least 1. No exponential overflows, and log Z - U is a sum of
two terms that are never negative. S and S * U merge over shards of the vocabulary by addition.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from exgrpo.kernels.torch_chunks import chunking
from exgrpo.kernels.vocab_parallel import VocabShard

UNDERFLOWN = -1e4
"""Stands for every d below it: exp is 0 in any dtype, and 0 * d must be 0 where d is -inf."""


class Statistics(NamedTuple):
    """Statistics of each row's softmax, all [rows]."""

    anchor: Tensor
    """a, the largest logit before the temperature."""
    gap: Tensor
    """d_y <= 0."""
    rest: Tensor
    """S."""
    mean: Tensor
    """U <= 0."""

    @property
    def excess(self) -> Tensor:
        """Z - 1."""
        return self.rest + torch.expm1(self.gap)

    @property
    def log_prob(self) -> Tensor:
        """log p_y."""
        return self.gap - torch.log1p(self.excess)

    @property
    def entropy(self) -> Tensor:
        """H."""
        return torch.log1p(self.excess) - self.mean

    def select(self, rows: Tensor | slice) -> "Statistics":
        """The statistics of some of the rows."""
        return Statistics(*(value[rows] for value in self))


class Targets(NamedTuple):
    """Local index of each row's target, [rows, 1], and whether this rank holds it (None: it holds all)."""

    position: Tensor
    held: Tensor | None

    def select(self, rows: Tensor | slice) -> "Targets":
        """Those of some of the rows."""
        return Targets(self.position[rows], None if self.held is None else self.held[rows])

    def put(self, values: Tensor, matrix: Tensor) -> None:
        """Writes values [rows] at the targets of ``matrix`` [rows, V]."""
        if matrix.shape[1]:
            values = values.unsqueeze(1)
            if self.held is not None:
                values = torch.where(self.held, values, matrix.gather(1, self.position))
            matrix.scatter_(1, self.position, values)


def shape_logits(logits: Tensor, bias: Tensor | None, softcap: float | None) -> None:
    """Adds the bias and caps the logits [rows, V], in place."""
    if bias is None and softcap is None:
        return
    for rows in _blocks(logits):
        block = logits[rows]
        if bias is not None:
            block.add_(bias)
        if softcap is not None:
            block.div_(softcap).tanh_().mul_(softcap)


def exponentials(logits: Tensor, target: Targets, temperature: Tensor | None, shard: VocabShard) -> Statistics:
    """Replaces logits [rows, V] by exp(d), 0 at the target, and returns the statistics over the whole vocabulary."""
    anchor, target_logit = _anchor(logits, target, shard)
    gap = target_logit - anchor
    if temperature is not None:
        gap = gap / temperature
    rest, moment = torch.empty_like(gap), torch.empty_like(gap)
    scratch = _scratch(logits)
    for rows in _blocks(logits):
        block = logits[rows]
        shifted = torch.sub(block, anchor[rows].unsqueeze(1), out=scratch[: block.shape[0]])
        if temperature is not None:
            shifted.div_(temperature[rows].unsqueeze(1))
        shifted.clamp_(min=UNDERFLOWN)
        torch.exp(shifted, out=block)
        target.select(rows).put(torch.zeros_like(gap[rows]), block)
        torch.sum(block, 1, out=rest[rows])
        torch.sum(shifted.mul_(block), 1, out=moment[rows])
    return finished(anchor, gap, *shard.sum_of(rest, moment))


def finished(anchor: Tensor, gap: Tensor, rest: Tensor, moment: Tensor) -> Statistics:
    """The statistics from the sums over v != y of exp(d_v) and of exp(d_v) d_v, all [rows]."""
    statistics = Statistics(anchor, gap, rest, moment)
    mean = (moment + gap.exp() * gap.clamp(min=UNDERFLOWN)) / (1 + statistics.excess)
    return statistics._replace(mean=mean)


def restore_exponentials(logits: Tensor, target: Targets, temperature: Tensor | None, statistics: Statistics) -> None:
    """Replaces logits [rows, V] by exp(d), 0 at the target, from statistics that are known."""
    for rows in _blocks(logits):
        block = logits[rows]
        block.sub_(statistics.anchor[rows].unsqueeze(1))
        if temperature is not None:
            block.div_(temperature[rows].unsqueeze(1))
        block.exp_()
        target.select(rows).put(torch.zeros_like(statistics.gap[rows]), block)


class RowGradient(NamedTuple):
    """Upstream gradient of each row's log-probability and entropy, [rows]; ``entropy`` None: zero."""

    log_prob: Tensor
    entropy: Tensor | None

    @property
    def active(self) -> Tensor:
        """The rows whose gradient is not zero, bool [rows]."""
        active = self.log_prob != 0
        return active if self.entropy is None else active | (self.entropy != 0)

    def select(self, rows: Tensor | slice) -> "RowGradient":
        """The gradient of some of the rows."""
        return RowGradient(self.log_prob[rows], None if self.entropy is None else self.entropy[rows])


def logit_gradient(
    exponential: Tensor,
    target: Targets,
    temperature: Tensor | None,
    softcap: float | None,
    statistics: Statistics,
    upstream: RowGradient,
) -> Tensor:
    """Turns exp(d) [rows, V] into F and returns r [rows]: the gradient of the raw logits is r[:, None] * F.

    With c and h the upstream gradients, it is -(c + h (d_v - U)) p_v / tau off the target and
    (c S / Z - h (d_y - U) p_y) / tau at the target. Without entropy and softcap, F is exp(d) itself with -S at the
    target: no pass over the chunk, the factors are left to the [rows, D] side of the products.
    """
    scale, at_target, entropy = row_factors(temperature, softcap, statistics, upstream)
    if entropy is None:
        target.put(at_target, exponential)
        return scale
    scratch = _scratch(exponential)
    for rows in _blocks(exponential):
        block, local = exponential[rows], target.select(rows)
        # log(exp(d)) is d to an ulp of 1 where exp(d) is a normal number, and weighs nothing where it is not.
        shifted = torch.log(block, out=scratch[: block.shape[0]]).clamp_(min=UNDERFLOWN)
        slope = None
        if softcap is not None:
            local.put(statistics.gap[rows], shifted)
            capped = shifted if temperature is None else shifted * temperature[rows].unsqueeze(1)
            slope = capped.add(statistics.anchor[rows].unsqueeze(1)).div_(softcap).square_().neg_().add_(1)
        shifted.sub_(statistics.mean[rows].unsqueeze(1)).mul_(entropy[rows].unsqueeze(1))
        block.mul_(shifted.add_(upstream.log_prob[rows].unsqueeze(1)))
        local.put(at_target[rows], block)
        if slope is not None:
            block.mul_(slope)
    return scale


def row_factors(
    temperature: Tensor | None, softcap: float | None, statistics: Statistics, upstream: RowGradient
) -> tuple[Tensor, Tensor, Tensor | None]:
    """r, F at the target but for the slope of the cap, and h, all [rows]; h None: F is exp(d) off the target."""
    scale = -1 / (1 + statistics.excess)
    if temperature is not None:
        scale = scale / temperature
    if upstream.entropy is None and softcap is None:
        return scale * upstream.log_prob, -statistics.rest, None
    entropy = torch.zeros_like(scale) if upstream.entropy is None else upstream.entropy
    distance = statistics.gap.clamp(min=UNDERFLOWN) - statistics.mean
    at_target = entropy * statistics.gap.exp() * distance - statistics.rest * upstream.log_prob
    return scale, at_target, entropy


def compact(matrix: Tensor, kept: Tensor) -> Tensor:
    """Moves the rows ``kept`` (ascending) of a matrix to its front, in place, and returns them.

    A row never moves down, so each block is read before anything is written over it.
    """
    for start, end in chunking.spans(kept.numel(), _block_rows(matrix)):
        matrix[start:end] = matrix[kept[start:end]]
    return matrix[: kept.numel()]


def _anchor(logits: Tensor, target: Targets, shard: VocabShard) -> tuple[Tensor, ...]:
    if logits.shape[1]:
        largest, at_target = logits.amax(1), logits.gather(1, target.position).squeeze(1)
        if target.held is not None:
            at_target = torch.where(target.held.squeeze(1), at_target, -torch.inf)
    else:
        largest = at_target = logits.new_full((logits.shape[0],), -torch.inf)
    return shard.largest_of(largest, at_target)


def _block_rows(matrix: Tensor) -> int:
    return chunking.block_rows(matrix.shape[1], matrix.dtype, matrix.device)


def _scratch(matrix: Tensor) -> Tensor:
    return matrix.new_empty(min(_block_rows(matrix), matrix.shape[0]), matrix.shape[1])


def _blocks(matrix: Tensor) -> Iterator[slice]:
    for start, end in chunking.spans(matrix.shape[0], _block_rows(matrix)):
        yield slice(start, end)
