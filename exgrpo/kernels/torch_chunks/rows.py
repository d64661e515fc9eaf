"""What a backend does with the rows of a chunk of logits; here in plain PyTorch."""

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from exgrpo.kernels.torch_chunks.softmax import (
    RowGradient,
    Statistics,
    exponentials,
    logit_gradient,
    restore_exponentials,
    shape_logits,
)

if TYPE_CHECKING:
    from exgrpo.kernels.torch_chunks.head import Chunk, ChunkedHead


class RowOperations(Protocol):
    """The passes over a chunk's logits [rows, V]. They get raw products; what they leave there is their own affair.

    `gradient` follows either `statistics` or `recall` of the same chunk.
    """

    compacts: bool
    """Whether rows without a gradient may be taken out of a chunk between `statistics` and `gradient`."""

    def statistics(self, head: "ChunkedHead", chunk: "Chunk", *, gradient_follows: bool) -> Statistics:
        """The statistics of each row over the whole vocabulary."""

    def recall(self, head: "ChunkedHead", chunk: "Chunk", statistics: Statistics) -> None:
        """Prepare `gradient` of raw products whose statistics are known."""

    def gradient(
        self, head: "ChunkedHead", chunk: "Chunk", statistics: Statistics, upstream: RowGradient
    ) -> tuple[Tensor, Tensor]:
        """F [rows, V] and r [rows]: the gradient of the raw products is r[:, None] * F."""


class TorchRows:
    """In place, a block of rows that stays in cache at a time."""

    compacts = True

    def statistics(self, head: "ChunkedHead", chunk: "Chunk", *, gradient_follows: bool) -> Statistics:
        """See `RowOperations`; leaves exp(d), 0 at the target."""
        shape_logits(chunk.logits, head.head.bias, head.options.softcap)
        return exponentials(chunk.logits, chunk.target, chunk.temperature, head.shard)

    def recall(self, head: "ChunkedHead", chunk: "Chunk", statistics: Statistics) -> None:
        """See `RowOperations`."""
        shape_logits(chunk.logits, head.head.bias, head.options.softcap)
        restore_exponentials(chunk.logits, chunk.target, chunk.temperature, statistics)

    def gradient(
        self, head: "ChunkedHead", chunk: "Chunk", statistics: Statistics, upstream: RowGradient
    ) -> tuple[Tensor, Tensor]:
        """See `RowOperations`."""
        softcap = head.options.softcap
        scale = logit_gradient(chunk.logits, chunk.target, chunk.temperature, softcap, statistics, upstream)
        return chunk.logits, scale
