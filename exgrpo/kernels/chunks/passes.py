"""What a backend provides: what it does with the logits of a chunk, and the small operations around the head.

Everything else about a chunk is the same for all backends.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from exgrpo.kernels.chunks.head import Chunk, ChunkedHead
from exgrpo.kernels.chunks.products import Products
from exgrpo.kernels.chunks.softmax import Factors, PolicyRows, RowTerms, Statistics, Sums
from exgrpo.kernels.inputs import LogProb, PolicyTokens, ScoredTokens, Surrogate
from exgrpo.kernels.objective import TokenObjective


class Passes(Protocol):
    """The passes over a chunk's logits [rows, V]; each call makes them anew.

    `sums` or `recall` begins a chunk and keeps what it needs of the logits; `select` may follow; `gradient` is last.
    """

    compacts: bool
    """Whether `select` is worth it: whether rows without a gradient are taken out between `sums` and `gradient`."""

    products: Products
    """Those that make gradients of what `gradient` returns."""

    tile: int
    """Tokens that the products compute together: a chunk has whole tiles of them."""

    def chunk_rows(self, *, gradient_follows: bool) -> int:
        """Tokens of a chunk, at most: as many as the memory of the call allows."""

    def sums(self, chunk: Chunk, *, gradient_follows: bool, with_entropy: bool = False) -> Sums:
        """The sums of each row over the whole vocabulary, and whether `gradient` follows, with an entropy's or not."""

    def finished(self, sums: Sums) -> tuple[Statistics, LogProb]:
        """Statistics, log-probabilities and entropies."""

    def policy(self, sums: Sums, chunk: Chunk, tokens: PolicyTokens, terms: RowTerms, out: Tensor) -> PolicyRows:
        """The objective of the chunk's ``tokens``, and the factors of its gradient: the rows of ``out`` [9, rows]."""

    def recall(self, chunk: Chunk, statistics: Statistics) -> None:
        """Begin a chunk whose statistics are known: only `gradient` follows."""

    def select(self, kept: Tensor) -> None:
        """Keep some rows of the chunk only, in the order of `head.packing`."""

    def gradient(self, chunk: Chunk, statistics: Statistics, factors: Factors) -> Tensor:
        """F [rows, V]: the gradient of the raw products is r[:, None] * F."""


PassesOf = Callable[[ChunkedHead], Passes]
"""Makes the passes for a head."""


class Backend(Protocol):
    """What a backend provides; a module of plain functions is one. All inputs are checked already."""

    def passes_of(self, head: ChunkedHead) -> Passes:
        """Makes the passes over the logits of a head."""

    def kept_passes_of(self, head: ChunkedHead) -> Passes:
        """Makes the passes over the logits of kept sets alone, where the tokens that take part have one."""

    def masked_passes_of(self, head: ChunkedHead) -> Passes:
        """Makes the passes over all logits of tokens with kept sets, which take those beside the sets out."""

    KEPT_PART: int
    """Sets of more than one part of so many of the vocabulary are for `masked_passes_of`."""

    def token_objective(self, scored: ScoredTokens, surrogate: Surrogate) -> TokenObjective:
        """The objective of tokens whose log-probabilities are known."""

    def centre_groups(self, reward: Tensor, group: Tensor, scale_by_std: bool) -> Tensor:
        """Reward [N] minus the mean of its group in float64, divided by the sample deviation if asked for."""

    def scale(self, values: Tensor, factor: Tensor) -> None:
        """Multiplies contiguous values in place by a factor [] that is on their device."""

    def segment_mean(self, values: Tensor, counted: Tensor, offsets: Tensor) -> Tensor:
        """Mean of the counted values of each segment."""


class Formulas(Protocol):
    """The formulas of `softmax` for rows whose sums are known; a module of plain functions is one."""

    def finished(self, sums: Sums) -> tuple[Statistics, LogProb]:
        """See `softmax.finished`."""

    def policy_rows(
        self, sums: Sums, tokens: PolicyTokens, terms: RowTerms, temperature: Tensor | None, out: Tensor
    ) -> PolicyRows:
        """See `softmax.policy_rows`."""


class ByFormulas:
    """The passes that read no logits, by a backend's formulas."""

    formulas: Formulas

    def finished(self, sums: Sums) -> tuple[Statistics, LogProb]:
        """See `Passes`."""
        return self.formulas.finished(sums)

    def policy(self, sums: Sums, chunk: Chunk, tokens: PolicyTokens, terms: RowTerms, out: Tensor) -> PolicyRows:
        """See `Passes`."""
        return self.formulas.policy_rows(sums, tokens, terms, chunk.temperature, out)
