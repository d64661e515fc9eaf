"""The passes over a chunk's rows as compiled kernels, see csrc/cpu/rows.h."""

from torch import Tensor

from exgrpo.kernels.chunks.head import Chunk
from exgrpo.kernels.chunks.softmax import Factors, Statistics, Sums
from exgrpo.kernels.cpu_chunks import cpu_tokens
from exgrpo.kernels.extension import OPERATORS
from exgrpo.kernels.torch_chunks.torch_passes import TorchPasses


class CpuPasses(TorchPasses):
    """All that is done with a row is done while it is in cache; what no gradient follows is not written back."""

    formulas = cpu_tokens

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
