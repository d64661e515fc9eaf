"""The passes over a chunk of logits in plain PyTorch, in place, a block of rows that stays in cache at a time.

See `chunks.softmax` for what they compute.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from exgrpo.kernels.chunks import chunking, softmax
from exgrpo.kernels.chunks.chunking import Cost
from exgrpo.kernels.chunks.head import Chunk, ChunkedHead, Targets
from exgrpo.kernels.chunks.passes import ByFormulas, Formulas
from exgrpo.kernels.chunks.softmax import UNDERFLOWN, Factors, Statistics, Sums
from exgrpo.kernels.inputs import VocabShard

BLOCKS = 5
"""Scratch blocks that exist at once, where logits are capped and tempered; fewer otherwise."""


class TorchPasses(ByFormulas):
    """The chunk's logits become exp(d), then F, in the same memory."""

    formulas: Formulas = softmax
    compacts = True
    tile = 1

    def __init__(self, head: ChunkedHead) -> None:
        self.head = head
        self.products = head.products
        weight, memory = head.head.weight, head.options.memory
        self.block = chunking.block_rows(head.shard.size, head.dtype, weight.device, memory)
        """Rows of a scratch block."""
        self._buffer: Tensor | None = None
        self._exponential = head.head.weight.new_empty(0)

    def chunk_rows(self, *, gradient_follows: bool) -> int:
        """See `Passes`."""
        memory, shard, device = self.head.options.memory, self.head.shard, self.head.head.weight.device
        if memory is None:
            return chunking.chunk_rows(shard.largest, self.head.dtype, device)
        return chunking.rows_within(memory, self.head.head.target.numel(), self.cost())

    def cost(self) -> Cost:
        """What a walk allocates with these passes: one matrix of logits, and blocks of it, of one row at least."""
        head = self.head
        row = head.shard.largest * head.dtype.itemsize
        products = self.products.cost(head.shard.largest)
        blocks = BLOCKS * (chunking.of_device(chunking.BLOCK_BYTES, head.head.weight.device),)
        fixed = products.fixed + BLOCKS * row + (0 if head.head.bias is None else 2 * row)
        return Cost(fixed, products.row + row + chunking.ROW_BYTES, products.scratch + blocks)

    def sums(self, chunk: Chunk, *, gradient_follows: bool, with_entropy: bool = False) -> Sums:
        """See `Passes`."""
        logits = self._logits(chunk)
        return exponentials(logits, chunk.target, chunk.temperature, self.head.shard, self.block)

    def recall(self, chunk: Chunk, statistics: Statistics) -> None:
        """See `Passes`."""
        restore_exponentials(self._logits(chunk), chunk.target, chunk.temperature, statistics, self.block)

    def select(self, kept: Tensor) -> None:
        """See `Passes`."""
        self._exponential = compact(self._exponential, kept, self.block)

    def gradient(self, chunk: Chunk, statistics: Statistics, factors: Factors) -> Tensor:
        """See `Passes`."""
        softcap = self.head.options.softcap
        logit_gradient(self._exponential, chunk.target, chunk.temperature, softcap, statistics, factors, self.block)
        return self._exponential

    def _logits(self, chunk: Chunk) -> Tensor:
        """A chunk's capped logits."""
        shape_logits(self._products(chunk), self.head.head.bias, self.head.options.softcap, self.block)
        return self._exponential

    def _products(self, chunk: Chunk) -> Tensor:
        """A chunk's raw products, in memory that the next chunk overwrites."""
        if self._buffer is None:
            self._buffer = self._memory(chunk)
        self._exponential = self.products.logits(chunk.hidden, self._buffer[: len(chunk.hidden)])
        return self._exponential

    def _memory(self, chunk: Chunk) -> Tensor:
        most = min(self.chunk_rows(gradient_follows=True), self.head.count)
        return chunk.hidden.new_empty(most, self.head.shard.size, dtype=self.head.dtype)


def shape_logits(logits: Tensor, bias: Tensor | None, softcap: float | None, step: int) -> None:
    """Adds the bias and caps the logits [rows, V], in place, ``step`` rows at a time, as all functions below."""
    if bias is None and softcap is None:
        return
    for rows in _blocks(logits, step):
        block = logits[rows]
        if bias is not None:
            block.add_(bias)
        if softcap is not None:
            block.div_(softcap).tanh_().mul_(softcap)


def exponentials(logits: Tensor, target: Targets, temperature: Tensor | None, shard: VocabShard, step: int) -> Sums:
    """Replaces logits [rows, V] by exp(d), 0 at the target, and returns the sums over the whole vocabulary."""
    anchor, target_logit = _anchor(logits, target, shard)
    gap = target_logit - anchor
    if temperature is not None:
        gap = gap / temperature
    rest, moment = torch.empty_like(gap), torch.empty_like(gap)
    scratch = _scratch(logits, step)
    for rows in _blocks(logits, step):
        block = logits[rows]
        shifted = torch.sub(block, anchor[rows].unsqueeze(1), out=scratch[: block.shape[0]])
        if temperature is not None:
            shifted.div_(temperature[rows].unsqueeze(1))
        shifted.clamp_(min=UNDERFLOWN)
        torch.exp(shifted, out=block)
        target.select(rows).put(torch.zeros_like(gap[rows]), block)
        torch.sum(block, 1, out=rest[rows])
        torch.sum(shifted.mul_(block), 1, out=moment[rows])
    return Sums(anchor, gap, *shard.sum_of(rest, moment))


def restore_exponentials(
    logits: Tensor, target: Targets, temperature: Tensor | None, statistics: Statistics, step: int
) -> None:
    """Replaces logits [rows, V] by exp(d), 0 at the target, from statistics that are known."""
    for rows in _blocks(logits, step):
        block = logits[rows]
        block.sub_(statistics.anchor[rows].unsqueeze(1))
        if temperature is not None:
            block.div_(temperature[rows].unsqueeze(1))
        block.exp_()
        target.select(rows).put(torch.zeros_like(statistics.gap[rows]), block)


def logit_gradient(
    exponential: Tensor,
    target: Targets,
    temperature: Tensor | None,
    softcap: float | None,
    statistics: Statistics,
    factors: Factors,
    step: int,
) -> None:
    """Turns exp(d) [rows, V] into F; without entropy and softcap there is no pass over the chunk."""
    if factors.upstream is None:
        target.put(factors.at_target, exponential)
        return
    log_prob, entropy = factors.upstream
    assert entropy is not None
    scratch = _scratch(exponential, step)
    for rows in _blocks(exponential, step):
        block, local = exponential[rows], target.select(rows)
        # log(exp(d)) is d to an ulp of 1 where exp(d) is a normal number, and weighs nothing where it is not.
        shifted = torch.log(block, out=scratch[: block.shape[0]]).clamp_(min=UNDERFLOWN)
        slope = None
        if softcap is not None:
            local.put(statistics.gap[rows], shifted)
            capped = shifted if temperature is None else shifted * temperature[rows].unsqueeze(1)
            slope = capped.add(statistics.anchor[rows].unsqueeze(1)).div_(softcap).square_().neg_().add_(1)
        shifted.sub_(statistics.mean[rows].unsqueeze(1)).mul_(entropy[rows].unsqueeze(1))
        block.mul_(shifted.add_(log_prob[rows].unsqueeze(1)))
        local.put(factors.at_target[rows], block)
        if slope is not None:
            block.mul_(slope)


def compact(matrix: Tensor, kept: Tensor, step: int) -> Tensor:
    """Moves the rows ``kept`` of a matrix to its front, in place, and returns them; for their order see `packing`.

    Rows move from behind the front into it, so nothing is overwritten before it is read.
    """
    gaps = (kept != torch.arange(kept.numel(), device=kept.device)).nonzero().squeeze(1)
    for start, end in chunking.spans(gaps.numel(), step):
        matrix[gaps[start:end]] = matrix[kept[gaps[start:end]]]
    return matrix[: kept.numel()]


def _anchor(logits: Tensor, target: Targets, shard: VocabShard) -> tuple[Tensor, ...]:
    if logits.shape[1]:
        largest, at_target = logits.amax(1), logits.gather(1, target.position).squeeze(1)
        if target.held is not None:
            at_target = torch.where(target.held.squeeze(1), at_target, -torch.inf)
    else:
        largest = at_target = logits.new_full((logits.shape[0],), -torch.inf)
    return shard.largest_of(largest, at_target)


def _scratch(matrix: Tensor, step: int) -> Tensor:
    return matrix.new_empty(min(step, matrix.shape[0]), matrix.shape[1])


def _blocks(matrix: Tensor, step: int) -> Iterator[slice]:
    for start, end in chunking.spans(matrix.shape[0], step):
        yield slice(start, end)
