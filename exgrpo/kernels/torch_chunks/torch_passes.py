"""The passes over a chunk's rows in plain PyTorch."""

from torch import Tensor

from exgrpo.kernels.chunks import chunking, softmax
from exgrpo.kernels.chunks.head import Chunk, ChunkedHead
from exgrpo.kernels.chunks.passes import ByFormulas, Formulas
from exgrpo.kernels.chunks.softmax import Factors, Statistics, Sums
from exgrpo.kernels.torch_chunks.in_place import (
    compact,
    exponentials,
    logit_gradient,
    restore_exponentials,
    shape_logits,
)


class TorchPasses(ByFormulas):
    """In place, a block of rows that stays in cache at a time: the chunk's logits become exp(d), then F."""

    formulas: Formulas = softmax
    compacts = True

    def __init__(self, head: ChunkedHead) -> None:
        self.head = head
        self.products = head.products
        self._buffer: Tensor | None = None
        self._exponential = head.head.weight.new_empty(0)

    def chunk_rows(self) -> int:
        """See `Passes`."""
        return chunking.chunk_rows(self.head.shard.largest, self.head.dtype, self.head.head.weight.device)

    def sums(self, chunk: Chunk, *, gradient_follows: bool, with_entropy: bool = False) -> Sums:
        """See `Passes`."""
        logits = self._logits(chunk)
        return exponentials(logits, chunk.target, chunk.temperature, self.head.shard)

    def recall(self, chunk: Chunk, statistics: Statistics) -> None:
        """See `Passes`."""
        restore_exponentials(self._logits(chunk), chunk.target, chunk.temperature, statistics)

    def select(self, kept: Tensor) -> None:
        """See `Passes`."""
        self._exponential = compact(self._exponential, kept)

    def gradient(self, chunk: Chunk, statistics: Statistics, factors: Factors) -> Tensor:
        """See `Passes`."""
        logit_gradient(
            self._exponential, chunk.target, chunk.temperature, self.head.options.softcap, statistics, factors
        )
        return self._exponential

    def _logits(self, chunk: Chunk) -> Tensor:
        """A chunk's capped logits."""
        shape_logits(self._products(chunk), self.head.head.bias, self.head.options.softcap)
        return self._exponential

    def _products(self, chunk: Chunk) -> Tensor:
        """A chunk's raw products, in memory that the next chunk overwrites."""
        if self._buffer is None:
            self._buffer = self._memory(chunk)
        self._exponential = self.head.products.logits(chunk.hidden, self._buffer[: len(chunk.hidden)])
        return self._exponential

    def _memory(self, chunk: Chunk) -> Tensor:
        most = min(self.chunk_rows(), self.head.count)
        return chunk.hidden.new_empty(most, self.head.shard.size, dtype=self.head.dtype)
