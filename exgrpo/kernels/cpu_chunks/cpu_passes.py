"""The passes over a chunk's rows, or over the pairs of its sets, as compiled kernels: csrc/cpu/rows.h and kept.h."""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from exgrpo.kernels.chunks.head import Chunk, ChunkedHead
from exgrpo.kernels.chunks.passes import Held
from exgrpo.kernels.chunks.products import MatrixGradient, Products
from exgrpo.kernels.chunks.softmax import Factors, Statistics, Sums
from exgrpo.kernels.cpu_chunks import cpu_tokens
from exgrpo.kernels.extension import OPERATORS
from exgrpo.kernels.torch_chunks.torch_allowed import AllowedPasses, Sets, reduced, sets_of
from exgrpo.kernels.torch_chunks.torch_passes import TorchPasses


class CpuProducts(Products):
    """The library's products, and a sum over rows whose order is its own."""

    def add_bias_gradient(self, grad_logits: Tensor, factor: Tensor, total: Tensor) -> None:
        OPERATORS.add_column_sums(grad_logits, factor, total)


class CpuPasses(TorchPasses):
    """Compiled passes: a row is read once, while it is in cache, and is written back only if a gradient follows."""

    formulas = cpu_tokens

    def __init__(self, head: ChunkedHead) -> None:
        super().__init__(head)
        self.products = CpuProducts(head.head.weight, head.options.operand, head.options.memory)

    @cached_property
    def buffer(self) -> Tensor:
        memory = super().buffer
        # The page faults of a fresh buffer cost several per cent of the product that fills it.
        OPERATORS.advise_huge_pages(memory)
        return memory

    def chunk_forward(self, chunk: Chunk, *, gradient_follows: bool, with_entropy: bool = False) -> tuple[Sums, Held]:
        logits, shard = self.raw(chunk), self.head.shard
        if not shard.group_name:
            return Sums(*self._sums(logits, chunk, None, write=gradient_follows)), logits
        (anchor,) = shard.largest_of(OPERATORS.row_largest(logits, *self._shape()))
        _, gap, rest, moment = self._sums(logits, chunk, anchor, write=gradient_follows, shaped=True)
        return Sums(anchor, *shard.largest_of(gap), *shard.sum_of(rest, moment)), logits

    def chunk_gradient(
        self, chunk: Chunk, held: Tensor | None, statistics: Statistics, factors: Factors
    ) -> MatrixGradient:
        if held is None:
            held = self.raw(chunk)
            self._sums(held, chunk, statistics.anchor.contiguous(), write=True)
        upstream = factors.upstream
        if upstream is None:
            chunk.target.put(factors.at_target, held)
            return self.products.gradient(held)
        OPERATORS.row_gradient(
            held,
            chunk.target.local(),
            chunk.temperature,
            self.head.options.softcap,
            *(value.contiguous() for value in (statistics.anchor, statistics.gap, statistics.mean)),
            *(value.contiguous() for value in (factors.at_target, upstream.log_prob, upstream.entropy)),
        )
        return self.products.gradient(held)

    def _sums(
        self, logits: Tensor, chunk: Chunk, anchor: Tensor | None, *, write: bool, shaped: bool = False
    ) -> Tensor:
        """Anchor, gap, S and sum of exp(d) d of each row, [4, rows]."""
        shape = (None, None) if shaped else self._shape()
        return OPERATORS.row_sums(logits, *shape, chunk.target.local(), chunk.temperature, anchor, write)

    def _shape(self) -> tuple[Tensor | None, float | None]:
        bias = self.head.head.bias
        return None if bias is None else bias.to(self.head.dtype).contiguous(), self.head.options.softcap


ALLOWED_PART = 16
"""On a 2-core CPU, width 256 and 896, bf16 and fp32: from a 10th to an 18th of the words on, all logits are faster."""


def allowed_passes_of(head: ChunkedHead) -> AllowedPasses:
    """Return the passes over allowed tokens: compiled where the weight is stored as it is multiplied."""
    compiled = head.head.weight.dtype == head.options.operand != torch.float16
    return CpuAllowedPasses(head) if compiled else AllowedPasses(head)


class CpuAllowedPasses(AllowedPasses):
    """Compiled passes over pairs: the kernels read the rows where they are."""

    formulas = cpu_tokens
    pair_bytes = 12
    """A number, and in the gradient of the weight a key that is sorted."""
    blocks = 0  # nothing is gathered

    def __init__(self, head: ChunkedHead) -> None:
        super().__init__(head)
        self.weight = unit_stride(self.weight)
        self.written_once = self.operand
        bias = head.head.bias
        self.bias = None if bias is None else bias.to(self.compute).contiguous()
        self.ids = head.sets.ids.contiguous()

    def chunk_forward(self, chunk: Chunk, *, gradient_follows: bool, with_entropy: bool = False) -> tuple[Sums, Held]:
        sets, shard = self._sets(chunk), self.head.shard
        logits = self._logits(chunk, sets)
        if not shard.group_name:
            return Sums(*self._sums(logits, chunk, sets, None, write=gradient_follows)), (sets, logits)
        (largest,) = shard.largest_of(reduced(logits, "max", sets[0]))
        anchor, gap, rest, moment = self._sums(logits, chunk, sets, largest, write=gradient_follows)
        return Sums(anchor, *shard.largest_of(gap), *shard.sum_of(rest, moment)), (sets, logits)

    def chunk_gradient(
        self, chunk: Chunk, held: Held | None, statistics: Statistics, factors: Factors
    ) -> "CpuPairGradient":
        if held is None:
            sets = self._sets(chunk)
            values = self._logits(chunk, sets)
            self._sums(values, chunk, sets, statistics.anchor.contiguous(), write=True)
        else:
            sets, values = held
        upstream = factors.upstream or (None, None)
        OPERATORS.kept_gradient(
            values,
            self.ids,
            *sets[0],
            sets[1],
            chunk.temperature,
            self.head.options.softcap,
            *(value.contiguous() for value in (statistics.anchor, statistics.gap, statistics.mean)),
            factors.at_target.contiguous(),
            *(None if value is None else value.contiguous() for value in upstream),
        )
        return CpuPairGradient(self, sets[0], values)

    def _sets(self, chunk: Chunk) -> tuple[Sets, Tensor]:
        return sets_of(self.head, chunk), self.head.of_tokens(self.head.head.target, chunk.rows).contiguous()

    def _logits(self, chunk: Chunk, sets: tuple[Sets, Tensor]) -> Tensor:
        softcap, first = self.head.options.softcap, self.head.shard.offset
        hidden = unit_stride(chunk.hidden)
        return OPERATORS.kept_logits(hidden, self.weight, self.bias, softcap, self.ids, first, *sets[0])

    def _sums(
        self, logits: Tensor, chunk: Chunk, sets: tuple[Sets, Tensor], anchor: Tensor | None, *, write: bool
    ) -> Tensor:
        """Return anchor, gap, S and sum of exp(d) d of each row, [4, rows]; ``write``: exp(d) over the logits."""
        return OPERATORS.kept_sums(logits, self.ids, *sets[0], sets[1], chunk.temperature, anchor, write)


class CpuPairGradient(NamedTuple):
    """A `products.LogitGradient` whose F are the numbers of pairs."""

    passes: CpuAllowedPasses
    sets: Sets
    values: Tensor

    def hidden_gradient(self) -> Tensor:
        weight, ids, first = self.passes.weight, self.passes.ids, self.passes.head.shard.offset
        return OPERATORS.kept_hidden_gradient(self.values, weight, ids, first, *self.sets)

    def add_weight_gradient(self, hidden: Tensor, factor: Tensor, total: Tensor, *, fresh: bool) -> None:
        factor, first = factor.squeeze(1).contiguous(), self.passes.head.shard.offset
        hidden = unit_stride(hidden)
        if fresh:
            OPERATORS.advise_huge_pages(total)  # page faults take longer than all products of small sets
        OPERATORS.kept_weight_gradient(self.values, hidden, factor, self.passes.ids, first, *self.sets, total, fresh)

    def add_bias_gradient(self, factor: Tensor, total: Tensor) -> None:
        ones = factor.new_ones(len(factor), 1)
        self.add_weight_gradient(ones, factor.unsqueeze(1), total.unsqueeze(1), fresh=False)


def unit_stride(matrix: Tensor) -> Tensor:
    """Return the matrix with the numbers of a row end to end."""
    return matrix if matrix.shape[1] < 2 or matrix.stride(1) == 1 else matrix.contiguous()
