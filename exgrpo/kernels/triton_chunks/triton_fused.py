"""The passes of a chunk whose logits are never written: the fused product, see `fused_product`, leaves exponentials."""

import torch
from torch import Tensor

from exgrpo.kernels.chunks.chunking import Cost
from exgrpo.kernels.chunks.head import Chunk, ChunkedHead
from exgrpo.kernels.chunks.softmax import Factors, Statistics, Sums
from exgrpo.kernels.triton_chunks.fused_product import AnchoredRows, FusedProduct, Operands, fused_sums, partial_bytes
from exgrpo.kernels.triton_chunks.launch import Plan
from exgrpo.kernels.triton_chunks.row_kernels import entropy_kernel
from exgrpo.kernels.triton_chunks.triton_passes import TritonPasses, aligned_columns


class FusedTritonPasses(TritonPasses):
    """The product itself gives exp(d) and its sums; F is made of the exponentials."""

    def __init__(self, head: ChunkedHead, chosen: Plan) -> None:
        super().__init__(head, chosen)
        self._exponential = self._logits

    def sums(self, chunk: Chunk, *, gradient_follows: bool, with_entropy: bool = False) -> Sums:
        """See `Passes`."""
        out = self._matrix(chunk) if gradient_follows else None
        self._written = None if with_entropy else out
        product = self.product(self._operands(chunk), out)
        return fused_sums(product, chunk.target, chunk.temperature, self.head.shard, out)

    def _matrix(self, chunk: Chunk) -> Tensor:
        """Where the chunk's exponentials go; the next chunk overwrites them."""
        dtype = self.head.options.operand if self.products.mixed else self.head.dtype
        self._exponential = self._memory(chunk, dtype)
        return self._exponential

    def _operands(self, chunk: Chunk) -> Operands:
        return Operands(chunk.hidden.contiguous(), self.products.weight, self.bias)

    def cost(self, gradient_follows: bool) -> Cost:
        """What a walk allocates with these passes: exponentials instead of products, and the sums of tiles."""
        cost, vocabulary = super().cost(gradient_follows), self.head.shard.largest
        row = cost.row + partial_bytes(vocabulary, self.plan.tile.columns)
        # Where the exponentials are narrow, they are what `Products` would round; a forward alone has none.
        if self.products.mixed or not gradient_follows:
            row -= aligned_columns(vocabulary) * self.head.dtype.itemsize
        if not gradient_follows and self.products.operand != self.head.dtype:
            row -= vocabulary * self.products.operand.itemsize
        return cost._replace(row=row)

    def product(self, operands: Operands, out: Tensor | None) -> FusedProduct:
        """What computes a chunk's exponentials into ``out``."""
        return FusedProduct(operands, self.softcap, self.plan.tile)

    def recall(self, chunk: Chunk, statistics: Statistics) -> None:
        """See `Passes`."""
        rows = AnchoredRows(chunk.target.local(), statistics.anchor.contiguous(), chunk.temperature)
        out, self._written = self._matrix(chunk), None
        self.product(self._operands(chunk), out).exponentials(rows, out, None)

    def gradient(self, chunk: Chunk, statistics: Statistics, factors: Factors) -> Tensor:
        """See `Passes`."""
        matrix, upstream = self._exponential, factors.upstream
        if self._written is not None:
            return self._written
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
        return matrix
