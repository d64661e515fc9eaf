"""The passes of a chunk whose logits are never written: the fused product, see `fused_product`, leaves exponentials."""

from functools import cached_property

import torch
import triton
from torch import Tensor

from exgrpo.kernels.chunks.chunking import Cost
from exgrpo.kernels.chunks.head import Chunk
from exgrpo.kernels.chunks.products import MatrixGradient
from exgrpo.kernels.chunks.softmax import Factors, Statistics, Sums
from exgrpo.kernels.triton_chunks.fused_product import (
    AnchoredRows,
    FusedProduct,
    GradientRows,
    Operands,
    fused_sums,
    partial_bytes,
)
from exgrpo.kernels.triton_chunks.row_kernels import entropy_kernel
from exgrpo.kernels.triton_chunks.triton_passes import Matrices, TritonPasses, aligned_columns

ENTROPY_BLOCKS = 2
"""Blocks of a row that a program of `entropy_kernel` reads: many short programs keep more loads in flight than few long
ones. Not yet timed on a GPU."""


class FusedTritonPasses(TritonPasses):
    """Passes with a product that writes exp(d) and its sums; F is made of the exponentials."""

    @cached_property
    def buffer(self) -> Tensor:
        return self._scratch(self.head.options.operand if self.products.mixed else self.head.dtype)

    def chunk_forward(
        self, chunk: Chunk, *, gradient_follows: bool, with_entropy: bool = False
    ) -> tuple[Sums, Matrices]:
        out = self.buffer[: len(chunk.hidden)] if gradient_follows else None
        product = self.product(self._operands(chunk), out)
        sums = fused_sums(product, chunk.target, chunk.temperature, self.head.shard, out)
        return sums, Matrices(out, None if with_entropy else out)

    def _operands(self, chunk: Chunk) -> Operands:
        return Operands(chunk.hidden.contiguous(), self.products.weight, self.bias)

    def cost(self, vocabulary: int, gradient_follows: bool = True) -> Cost:
        # Exponentials instead of products, and the sums of tiles.
        cost = super().cost(vocabulary, gradient_follows)
        row = cost.row + partial_bytes(vocabulary, self.plan.tile.columns)
        # Where the exponentials are narrow, they are what `Products` would round; a forward alone has none.
        if self.products.mixed or not gradient_follows:
            row -= aligned_columns(vocabulary) * self.head.dtype.itemsize
        if not gradient_follows and self.products.operand != self.head.dtype:
            row -= vocabulary * self.products.operand.itemsize
        return cost._replace(row=row)

    def product(self, operands: Operands, out: Tensor | None) -> FusedProduct:
        """Return the product that writes a chunk's exponentials into ``out``."""
        return FusedProduct(operands, self.plan.tile)

    def chunk_gradient(
        self, chunk: Chunk, held: Matrices | None, statistics: Statistics, factors: Factors
    ) -> MatrixGradient:
        if held is not None and held.gradient is not None:
            return self.products.gradient(held.gradient)
        upstream = factors.upstream
        at_target = factors.at_target.contiguous()
        if held is None or held.matrix is None:
            rows = AnchoredRows(chunk.target.local(), statistics.anchor.contiguous(), chunk.temperature)
            known = GradientRows(at_target, None, None)
            if upstream is not None:
                intercept = torch.addcmul(upstream.log_prob, upstream.entropy, statistics.mean, value=-1)
                known = GradientRows(at_target, intercept, upstream.entropy.contiguous())
            matrix = self.buffer[: len(chunk.hidden)]
            self.product(self._operands(chunk), matrix).gradient(rows, known, matrix)
            return self.products.gradient(matrix)
        matrix = held.matrix
        assert upstream is not None  # `policy` completes what needs no pass
        if matrix.shape[1]:
            columns = ENTROPY_BLOCKS * self.plan.rows.block
            with torch.cuda.device_of(matrix):
                entropy_kernel[(matrix.shape[0], triton.cdiv(matrix.shape[1], columns))](
                    matrix,
                    chunk.target.local(),
                    statistics.mean.contiguous(),
                    at_target,
                    upstream.log_prob.contiguous(),
                    upstream.entropy.contiguous(),
                    matrix.shape[1],
                    matrix.stride(0),
                    BLOCK=self.plan.rows.block,
                    BLOCKS=ENTROPY_BLOCKS,
                    num_warps=self.plan.rows.warps,
                )
        return self.products.gradient(matrix)
