"""The passes of a chunk whose logits are never written: the fused product, see `fused_product`, leaves exponentials."""

from functools import cached_property

import torch
from torch import Tensor

from exgrpo.kernels.chunks.chunking import Cost
from exgrpo.kernels.chunks.head import Chunk
from exgrpo.kernels.chunks.products import MatrixGradient
from exgrpo.kernels.chunks.softmax import Factors, Statistics, Sums
from exgrpo.kernels.triton_chunks.fused_product import AnchoredRows, FusedProduct, Operands, fused_sums, partial_bytes
from exgrpo.kernels.triton_chunks.row_kernels import entropy_kernel
from exgrpo.kernels.triton_chunks.triton_passes import Matrices, TritonPasses, aligned_columns


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
        return FusedProduct(operands, self.softcap, self.plan.tile)

    def chunk_gradient(
        self, chunk: Chunk, held: Matrices | None, statistics: Statistics, factors: Factors
    ) -> MatrixGradient:
        if held is not None and held.gradient is not None:
            return self.products.gradient(held.gradient)
        matrix = None if held is None else held.matrix
        if matrix is None:
            rows = AnchoredRows(chunk.target.local(), statistics.anchor.contiguous(), chunk.temperature)
            matrix = self.buffer[: len(chunk.hidden)]
            self.product(self._operands(chunk), matrix).exponentials(rows, matrix, None)
        upstream = factors.upstream
        if upstream is None or upstream.entropy is None:
            chunk.target.put(factors.at_target.to(matrix.dtype), matrix)
        elif matrix.shape[1]:
            with torch.cuda.device_of(matrix):
                entropy_kernel[(matrix.shape[0],)](
                    matrix,
                    chunk.target.local(),
                    statistics.mean.contiguous(),
                    factors.at_target.contiguous(),
                    upstream.log_prob.contiguous(),
                    upstream.entropy.contiguous(),
                    matrix.shape[1],
                    matrix.stride(0),
                    BLOCK=self.plan.rows.block,
                    num_warps=self.plan.rows.warps,
                )
        return self.products.gradient(matrix)
