"""bfloat16 heads without a matrix of logits: the product's tiles become exponentials and their sums in the cache.

With the target's logit as anchor, known beforehand by a product per token, exp(d) is known as soon as a tile is. The
sums merge by addition, over tiles and over ranks. The few rows whose target is next to impossible are done again from
their largest logit. See csrc/cpu/product.h for the products.
"""

from functools import cached_property

import torch
from torch import Tensor

from exgrpo.kernels import backend_choice
from exgrpo.kernels.chunks import chunking
from exgrpo.kernels.chunks.chunking import Cost
from exgrpo.kernels.chunks.head import Chunk, ChunkedHead
from exgrpo.kernels.chunks.passes import Held
from exgrpo.kernels.chunks.products import MatrixGradient
from exgrpo.kernels.chunks.softmax import LARGEST_SUM, Factors, Statistics, Sums
from exgrpo.kernels.cpu_chunks.cpu_passes import CpuPasses, CpuProducts, unit_stride
from exgrpo.kernels.extension import OPERATORS

MOST_ROWS = 2048
"""Of a chunk: so many entries of some columns of the exponentials fit the second-level cache."""


def passes_of(head: ChunkedHead) -> CpuPasses:
    """Return the passes for a head."""
    weight, options = head.head.weight, head.options
    bfloat16 = options.operand == weight.dtype == torch.bfloat16
    # The ranks of a group have to take the same passes, however each of them stores its part of the weight.
    readable = weight.stride(1) == 1 or bool(head.shard.group_name)
    # The exponentials of a capped logit do not tell how steep the cap is there.
    fused = bfloat16 and readable and options.softcap is None and not OPERATORS.product_unavailable()
    backend_choice.say_product(options.operand, weight.shape[1], fused)
    return FusedCpuPasses(head) if fused else CpuPasses(head)


class TileProducts(CpuProducts):
    """Gradient products with bfloat16 operands and float32 sums, which one chunk alone rounds as it writes them."""

    def __init__(self, weight: Tensor, operand: torch.dtype) -> None:
        super().__init__(unit_stride(weight), operand)
        self.copied = self.weight is not weight
        self.written_once = operand

    def cost(self, vocabulary: int) -> Cost:
        # Nothing is converted, nor rounded.
        return super().cost(vocabulary)._replace(row=self.weight.shape[1] * 10, scratch=())

    def hidden_gradient(self, grad_logits: Tensor) -> Tensor:
        return OPERATORS.product_hidden_gradient(grad_logits, self.weight)

    def add_weight_gradient(
        self, grad_logits: Tensor, hidden: Tensor, factor: Tensor, total: Tensor, *, fresh: bool
    ) -> None:
        factor = factor.squeeze(1).contiguous()
        OPERATORS.product_weight_gradient(grad_logits, unit_stride(hidden), factor, total, fresh)


class FusedCpuPasses(CpuPasses):
    """Passes with a product that writes exp(d) and its sums; F is made of the exponentials."""

    held_dtype = torch.bfloat16

    def __init__(self, head: ChunkedHead) -> None:
        super().__init__(head)
        bias = head.head.bias
        self.bias = None if bias is None else bias.float().contiguous()
        self.products = TileProducts(head.head.weight, head.options.operand)
        self.products.copied |= bool(head.shard.group_name)  # as some rank may: all have the same rows

    def chunk_rows(self, *, gradient_follows: bool) -> int:
        return min(super().chunk_rows(gradient_follows=gradient_follows), MOST_ROWS)

    def cost(self, columns: int) -> Cost:
        """Return the bytes of a walk with these passes: a matrix of exponentials, and a bias in fp32."""
        products = self.products.cost(columns)
        row = products.row + _row_stride(columns) * torch.bfloat16.itemsize + chunking.ROW_BYTES
        return Cost(products.fixed + 4 * columns, row, products.scratch)

    @cached_property
    def buffer(self) -> Tensor:
        rows, columns = min(self.chunk_rows(gradient_follows=True), self.head.count), self.head.shard.size
        return self.head.head.hidden.new_empty(rows, _row_stride(columns), dtype=torch.bfloat16)[:, :columns]

    def chunk_forward(self, chunk: Chunk, *, gradient_follows: bool, with_entropy: bool = False) -> tuple[Sums, Held]:
        shard, weight = self.head.shard, self.products.weight
        hidden, target = unit_stride(chunk.hidden), chunk.target.local()
        at_target = OPERATORS.product_target_logits(hidden, weight, self.bias, target)
        (at_target,) = shard.largest_of(at_target)
        out = self.buffer[: len(chunk.hidden)] if gradient_follows else None
        rest, moment = self._exponentials(chunk, at_target, out)
        # Beyond the limit, or overflown. Where the target's logit itself is NaN, nothing mends it.
        # By the operands alone: with and without a gradient the anchors are the same.
        far = (~(rest <= LARGEST_SUM) & ~at_target.isnan()).nonzero().squeeze(1)
        anchor = at_target
        if far.numel():
            (largest,) = shard.largest_of(OPERATORS.product_largest(hidden[far], weight, self.bias))
            anchor = at_target.index_copy(0, far, largest)
            again = self._exponentials(chunk.select(far), largest, out, far)
            rest, moment = rest.index_copy(0, far, again[0]), moment.index_copy(0, far, again[1])
        return Sums(anchor, chunk.tempered(at_target - anchor), rest, moment), out

    def chunk_gradient(
        self, chunk: Chunk, held: Tensor | None, statistics: Statistics, factors: Factors
    ) -> MatrixGradient:
        if held is None:
            held = self.buffer[: len(chunk.hidden)]
            self._exponentials(chunk, statistics.anchor.contiguous(), held)
        upstream = factors.upstream
        if upstream is None:
            chunk.target.put(factors.at_target.to(held.dtype), held)
            return self.products.gradient(held)
        vectors = (statistics.mean, upstream.log_prob, upstream.entropy, factors.at_target)
        OPERATORS.product_entropy_gradient(held, chunk.target.local(), *(value.contiguous() for value in vectors))
        return self.products.gradient(held)

    def _exponentials(
        self, chunk: Chunk, anchor: Tensor, out: Tensor | None, places: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """S and sum of exp(d) d of a chunk's rows over all shards; exp(d) into ``out``, there into the rows named."""
        sums = OPERATORS.product_sums(
            unit_stride(chunk.hidden),
            self.products.weight,
            self.bias,
            chunk.target.local(),
            anchor,
            chunk.temperature,
            out,
            places,
        )
        return self.head.shard.sum_of(*sums)


def _row_stride(columns: int) -> int:
    """An odd number of cache lines: rows that are read together do not meet in few sets of the cache."""
    line = 32
    return (-(-columns // line) | 1) * line
