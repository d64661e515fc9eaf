"""The passes over a chunk of logits in plain PyTorch, in place, a block of rows that stays in cache at a time.

See `chunks.softmax` for what they compute.
"""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from exgrpo.kernels.chunks import chunking
from exgrpo.kernels.chunks.chunking import Cost
from exgrpo.kernels.chunks.head import Chunk, ChunkedHead, Targets
from exgrpo.kernels.chunks.passes import ByFormulas, Held, columns_within
from exgrpo.kernels.chunks.products import MatrixGradient
from exgrpo.kernels.chunks.softmax import UNDERFLOWN, Factors, Statistics, Sums

BLOCKS = 5
"""Scratch blocks that exist at once, where logits are capped and tempered; fewer otherwise."""


class TorchPasses(ByFormulas):
    """Passes in place: the chunk's logits become exp(d), then F, in the same memory."""

    tile = 1
    held_dtype: torch.dtype | None = None
    """Of what is held of a logit; None: that of the logits."""

    def __init__(self, head: ChunkedHead) -> None:
        self.head = head
        self.products = head.products
        weight, memory = head.head.weight, head.options.memory
        self.block = chunking.block_rows(head.shard.size * head.dtype.itemsize, weight.device, memory)

    @property
    def written_once(self) -> torch.dtype:
        return self.products.written_once

    @cached_property
    def buffer(self) -> Tensor:
        """Scratch memory of a chunk, [rows, V]."""
        most = min(self.chunk_rows(gradient_follows=True), self.head.count)
        return self.head.head.hidden.new_empty(most, self.head.shard.size, dtype=self.head.dtype)

    def chunk_rows(self, *, gradient_follows: bool) -> int:
        memory, shard, device = self.head.options.memory, self.head.shard, self.head.head.weight.device
        if self.head.at_once is not None:
            return self.head.at_once
        if memory is None:
            return chunking.chunk_rows(shard.largest, self.held_dtype or self.head.dtype, device)
        return chunking.rows_within(memory, self.head.head.target.numel(), self.cost(shard.largest))

    def slice_columns(self) -> int:
        # One thread of a CPU took 1.00 to 1.13 times as long with slices as with chunks, in float32 and bfloat16.
        if not self.products.mixed:
            return 0
        memory = self.head.options.memory
        return columns_within(self.head, chunking.GPU_MEMORY if memory is None else memory, self.cost)

    def cost(self, columns: int) -> Cost:
        """Return the bytes of a walk with these passes: a matrix of logits, and blocks of it, of one row at least."""
        head, row = self.head, columns * self.head.dtype.itemsize
        products = self.products.cost(columns)
        blocks = BLOCKS * (chunking.of_device(chunking.BLOCK_BYTES, head.head.weight.device),)
        fixed = products.fixed + BLOCKS * row + (0 if head.head.bias is None else 2 * row)
        return Cost(fixed, products.row + row + chunking.ROW_BYTES, products.scratch + blocks)

    def chunk_forward(self, chunk: Chunk, *, gradient_follows: bool, with_entropy: bool = False) -> tuple[Sums, Held]:
        logits = self.logits(chunk)
        return self._exponentiate(logits, chunk), logits

    def chunk_gradient(
        self, chunk: Chunk, held: Tensor | None, statistics: Statistics, factors: Factors
    ) -> MatrixGradient:
        if held is None:
            held = self.logits(chunk)
            self._restore_exponentials(held, chunk, statistics)
        self._form_gradient(held, chunk, statistics, factors)
        return self.products.gradient(held)

    def raw(self, chunk: Chunk) -> Tensor:
        """Return a chunk's raw products."""
        return self.products.logits(chunk.hidden, self.buffer[: len(chunk.hidden)])

    def logits(self, chunk: Chunk) -> Tensor:
        """Return a chunk's capped logits."""
        logits, bias, softcap = self.raw(chunk), self.head.head.bias, self.head.options.softcap
        if bias is None and softcap is None:
            return logits
        for _, block in self._blocks(logits):
            if bias is not None:
                block.add_(bias)
            if softcap is not None:
                block.div_(softcap).tanh_().mul_(softcap)
        return logits

    def _exponentiate(self, logits: Tensor, chunk: Chunk) -> Sums:
        """Replace logits [rows, V] by exp(d), 0 at the target, and return the sums over the whole vocabulary."""
        target, temperature, shard = chunk.target, chunk.temperature, self.head.shard
        anchor, target_logit = shard.largest_of(*_largest_and_target(logits, target))
        gap = chunk.tempered(target_logit - anchor)
        rest, moment = torch.empty_like(gap), torch.empty_like(gap)
        scratch = self._scratch(logits)
        for rows, block in self._blocks(logits):
            shifted = torch.sub(block, anchor[rows].unsqueeze(1), out=scratch[: block.shape[0]])
            if temperature is not None:
                shifted.div_(temperature[rows].unsqueeze(1))
            shifted.clamp_(min=UNDERFLOWN)
            torch.exp(shifted, out=block)
            target.select(rows).put(torch.zeros_like(gap[rows]), block)
            torch.sum(block, 1, out=rest[rows])
            torch.sum(shifted.mul_(block), 1, out=moment[rows])
        return Sums(anchor, gap, *shard.sum_of(rest, moment))

    def _restore_exponentials(self, logits: Tensor, chunk: Chunk, statistics: Statistics) -> None:
        """Replace logits [rows, V] by exp(d), 0 at the target, from statistics that are known."""
        for rows, block in self._blocks(logits):
            block.sub_(statistics.anchor[rows].unsqueeze(1))
            if chunk.temperature is not None:
                block.div_(chunk.temperature[rows].unsqueeze(1))
            block.exp_()
            chunk.target.select(rows).put(torch.zeros_like(statistics.gap[rows]), block)

    def _form_gradient(self, matrix: Tensor, chunk: Chunk, statistics: Statistics, factors: Factors) -> None:
        """Turn exp(d) [rows, V] into F; without entropy and softcap there is no pass over the chunk."""
        if factors.upstream is None:
            chunk.target.put(factors.at_target, matrix)
            return
        (log_prob, entropy), softcap, temperature = factors.upstream, self.head.options.softcap, chunk.temperature
        scratch = self._scratch(matrix)
        for rows, block in self._blocks(matrix):
            target = chunk.target.select(rows)
            # log(exp(d)) is d to an ulp of 1 where exp(d) is a normal number, and weighs nothing where it is not.
            shifted = torch.log(block, out=scratch[: block.shape[0]]).clamp_(min=UNDERFLOWN)
            slope = None
            if softcap is not None:
                target.put(statistics.gap[rows], shifted)
                capped = shifted if temperature is None else shifted * temperature[rows].unsqueeze(1)
                slope = capped.add(statistics.anchor[rows].unsqueeze(1)).div_(softcap).square_().neg_().add_(1)
            shifted.sub_(statistics.mean[rows].unsqueeze(1)).mul_(entropy[rows].unsqueeze(1))
            block.mul_(shifted.add_(log_prob[rows].unsqueeze(1)))
            target.put(factors.at_target[rows], block)
            if slope is not None:
                block.mul_(slope)

    def _scratch(self, matrix: Tensor) -> Tensor:
        return matrix.new_empty(min(self.block, matrix.shape[0]), matrix.shape[1])

    def _blocks(self, matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield a matrix in blocks of rows that stay in cache, each with its place."""
        for start, end in chunking.spans(matrix.shape[0], self.block):
            yield slice(start, end), matrix[start:end]


def _largest_and_target(logits: Tensor, target: Targets) -> tuple[Tensor, Tensor]:
    """Return the largest logit and the target's of each row, -inf where this rank has none."""
    if not logits.shape[1]:
        return 2 * (logits.new_full((logits.shape[0],), -torch.inf),)
    at_target = logits.gather(1, target.position).squeeze(1)
    if target.held is not None:
        at_target = torch.where(target.held.squeeze(1), at_target, -torch.inf)
    return logits.amax(1), at_target
