"""What a backend does with the rows of a chunk; everything else about a chunk is the same for all of them."""

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from exgrpo.kernels.chunks.products import Products
from exgrpo.kernels.chunks.softmax import Factors, PolicyRows, PolicyTokens, Statistics, Sums
from exgrpo.kernels.results import LogProb

if TYPE_CHECKING:
    from exgrpo.kernels.chunks.head import Chunk
    from exgrpo.kernels.inputs import PolicyTerms


class RowOperations(Protocol):
    """The passes over a chunk's logits [rows, V], made anew for every call.

    A chunk is begun by `sums` or `recall`; what they keep of its logits is their own affair. `select` may follow, and
    `gradient` comes last.
    """

    compacts: bool
    """Whether `select` is worth it: whether rows without a gradient are taken out between `sums` and `gradient`."""

    products: Products
    """Those that make gradients of what `gradient` returns."""

    def chunk_rows(self) -> int:
        """Tokens of a chunk, at most."""

    def sums(self, chunk: "Chunk", *, gradient_follows: bool, with_entropy: bool = False) -> Sums:
        """The sums of each row over the whole vocabulary, and whether `gradient` follows, with an entropy's or not."""

    def finished(self, sums: Sums) -> tuple[Statistics, LogProb]:
        """Statistics, log-probabilities and entropies."""

    def policy(
        self, sums: Sums, chunk: "Chunk", own: PolicyTokens, terms: "PolicyTerms", normalizer: Tensor
    ) -> PolicyRows:
        """The objective of the chunk's tokens, ``own``, and the factors of its gradient."""

    def recall(self, chunk: "Chunk", statistics: Statistics) -> None:
        """Begin a chunk whose statistics are known: only `gradient` follows."""

    def select(self, kept: Tensor) -> None:
        """Keep some rows of the chunk only, in the order of `head.packing`."""

    def gradient(self, chunk: "Chunk", statistics: Statistics, factors: Factors) -> Tensor:
        """F [rows, V]: the gradient of the raw products is r[:, None] * F."""
