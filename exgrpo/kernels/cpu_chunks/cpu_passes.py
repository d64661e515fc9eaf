"""The passes over a chunk's rows, or over the pairs of its sets, as compiled kernels: csrc/cpu/rows.h and kept.h."""

import torch
from torch import Tensor

from exgrpo.kernels.chunks.head import Chunk, ChunkedHead
from exgrpo.kernels.chunks.products import Products
from exgrpo.kernels.chunks.softmax import Factors, Statistics, Sums
from exgrpo.kernels.cpu_chunks import cpu_tokens
from exgrpo.kernels.extension import OPERATORS
from exgrpo.kernels.torch_chunks.torch_kept import KeptPasses, sets_of
from exgrpo.kernels.torch_chunks.torch_passes import TorchPasses


class CpuProducts(Products):
    """The library's products, and a sum over rows whose order is its own."""

    def add_bias_gradient(self, grad_logits: Tensor, factor: Tensor, total: Tensor) -> None:
        """See `Products`."""
        OPERATORS.add_column_sums(grad_logits, factor, total)


class CpuPasses(TorchPasses):
    """All that is done with a row is done while it is in cache; what no gradient follows is not written back."""

    formulas = cpu_tokens

    def __init__(self, head: ChunkedHead) -> None:
        super().__init__(head)
        self.products = CpuProducts(head.head.weight, head.options.operand, head.options.memory)

    def sums(self, chunk: Chunk, *, gradient_follows: bool, with_entropy: bool = False) -> Sums:
        """See `Passes`."""
        logits, shard = self._products(chunk), self.head.shard
        if not shard.group_name:
            return Sums(*self._sums(logits, chunk, None, write=gradient_follows))
        (anchor,) = shard.largest_of(OPERATORS.row_largest(logits, *self._shape()))
        _, gap, rest, moment = self._sums(logits, chunk, anchor, write=gradient_follows, shaped=True)
        return Sums(anchor, *shard.largest_of(gap), *shard.sum_of(rest, moment))

    def recall(self, chunk: Chunk, statistics: Statistics) -> None:
        """See `Passes`."""
        self._sums(self._products(chunk), chunk, statistics.anchor.contiguous(), write=True)

    def gradient(self, chunk: Chunk, statistics: Statistics, factors: Factors) -> Tensor:
        """See `Passes`."""
        matrix, upstream = self._exponential, factors.upstream
        if upstream is None or upstream.entropy is None:
            chunk.target.put(factors.at_target, matrix)
            return matrix
        OPERATORS.row_gradient(
            matrix,
            chunk.target.local(),
            chunk.temperature,
            self.head.options.softcap,
            *(value.contiguous() for value in (statistics.anchor, statistics.gap, statistics.mean)),
            *(value.contiguous() for value in (factors.at_target, upstream.log_prob, upstream.entropy)),
        )
        return matrix

    def _sums(
        self, logits: Tensor, chunk: Chunk, anchor: Tensor | None, *, write: bool, shaped: bool = False
    ) -> Tensor:
        """Anchor, gap, S and sum of exp(d) d of each row, [4, rows]."""
        shape = (None, None) if shaped else self._shape()
        return OPERATORS.row_sums(logits, *shape, chunk.target.local(), chunk.temperature, anchor, write)

    def _shape(self) -> tuple[Tensor | None, float | None]:
        """Bias and cap of the logits."""
        bias = self.head.head.bias
        return None if bias is None else bias.to(self.head.dtype).contiguous(), self.head.options.softcap

    def _memory(self, chunk: Chunk) -> Tensor:
        # The page faults of a fresh buffer cost several per cent of the product that fills it.
        memory = super()._memory(chunk)
        OPERATORS.advise_huge_pages(memory)
        return memory


KEPT_PART = 16
"""On a 2-core CPU, width 256 and 896, bf16 and fp32: from a 10th to an 18th of the words on, all logits are faster."""


def kept_passes_of(head: ChunkedHead) -> KeptPasses:
    """The passes over kept sets: compiled where the weight is stored as it is multiplied."""
    compiled = head.head.weight.dtype == head.options.operand != torch.float16
    return CpuKeptPasses(head) if compiled else KeptPasses(head)


class CpuKeptPasses(KeptPasses):
    """Nothing is gathered: the kernels read the rows where they are."""

    formulas = cpu_tokens
    pair_bytes = 12
    """A number, and in the gradient of the weight a key that is sorted."""

    def __init__(self, head: ChunkedHead) -> None:
        super().__init__(head)
        self.weight = unit_stride(self.weight)
        self.written_once = self.operand
        bias = head.head.bias
        self.bias = None if bias is None else bias.to(self.compute).contiguous()
        self.ids = torch.empty(0) if head.options.kept is None else head.options.kept.ids.contiguous()

    def scratch(self) -> tuple[int, ...]:
        """See `KeptPasses`."""
        return ()

    def begin(self, chunk: Chunk) -> Tensor:
        """See `KeptPasses`."""
        self.sets = sets_of(self.head, chunk)
        self.target = self.head.of_tokens(self.head.head.target, chunk.rows).contiguous()
        softcap, first = self.head.options.softcap, self.head.shard.offset
        hidden = unit_stride(chunk.hidden)
        return OPERATORS.kept_logits(hidden, self.weight, self.bias, softcap, self.ids, first, *self.sets)

    def sums(self, chunk: Chunk, *, gradient_follows: bool, with_entropy: bool = False) -> Sums:
        """See `Passes`."""
        logits, shard = self.begin(chunk), self.head.shard
        if not shard.group_name:
            return Sums(*self._sums(logits, chunk, None, write=gradient_follows))
        (largest,) = shard.largest_of(self._reduced(logits, "max"))
        anchor, gap, rest, moment = self._sums(logits, chunk, largest, write=gradient_follows)
        return Sums(anchor, *shard.largest_of(gap), *shard.sum_of(rest, moment))

    def recall(self, chunk: Chunk, statistics: Statistics) -> None:
        """See `Passes`."""
        self._sums(self.begin(chunk), chunk, statistics.anchor.contiguous(), write=True)

    def gradient(self, chunk: Chunk, statistics: Statistics, factors: Factors) -> Tensor:
        """See `Passes`."""
        upstream = factors.upstream or (None, None)
        OPERATORS.kept_gradient(
            self.values,
            self.ids,
            *self.sets,
            self.target,
            chunk.temperature,
            self.head.options.softcap,
            *(value.contiguous() for value in (statistics.anchor, statistics.gap, statistics.mean)),
            factors.at_target.contiguous(),
            *(None if value is None else value.contiguous() for value in upstream),
        )
        return self.values

    def hidden_gradient(self, grad_logits: Tensor) -> Tensor:
        """See `Products`."""
        return OPERATORS.kept_hidden_gradient(grad_logits, self.weight, self.ids, self.head.shard.offset, *self.sets)

    def add_weight_gradient(
        self, grad_logits: Tensor, hidden: Tensor, factor: Tensor, total: Tensor, *, fresh: bool
    ) -> None:
        """See `Products`."""
        factor, first = factor.squeeze(1).contiguous(), self.head.shard.offset
        hidden = unit_stride(hidden)
        if fresh:
            OPERATORS.advise_huge_pages(total)  # page faults take longer than all products of small sets
        OPERATORS.kept_weight_gradient(grad_logits, hidden, factor, self.ids, first, *self.sets, total, fresh)

    def add_bias_gradient(self, grad_logits: Tensor, factor: Tensor, total: Tensor) -> None:
        """See `Products`."""
        ones = factor.new_ones(len(factor), 1)
        self.add_weight_gradient(grad_logits, ones, factor.unsqueeze(1), total.unsqueeze(1), fresh=False)

    def _sums(self, logits: Tensor, chunk: Chunk, anchor: Tensor | None, *, write: bool) -> Tensor:
        """Anchor, gap, S and sum of exp(d) d of each row, [4, rows]; exp(d) over the logits."""
        self.values = logits
        return OPERATORS.kept_sums(logits, self.ids, *self.sets, self.target, chunk.temperature, anchor, write)


def unit_stride(matrix: Tensor) -> Tensor:
    """The same numbers, those of a row end to end."""
    return matrix if matrix.shape[1] < 2 or matrix.stride(1) == 1 else matrix.contiguous()
