"""What a backend does with the rows of a chunk; everything else about a chunk is the same for all of them."""

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from exgrpo.kernels.chunks.products import Products
from exgrpo.kernels.chunks.softmax import Factors, PolicyRows, PolicyTokens, Statistics, Sums
from exgrpo.kernels.results import LogProb

if TYPE_CHECKING:
    from exgrpo.kernels.chunks.head import Chunk, ChunkedHead
    from exgrpo.kernels.inputs import PolicyTerms


class TokenKernels(Protocol):
    """One kernel for each of the formulas of `softmax`; a module of plain functions is one."""

    def finish(self, gap: Tensor, rest: Tensor, moment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """U, log p_y and H [rows]: `softmax.finished`."""

    def policy_rows(
        self,
        gap: Tensor,
        rest: Tensor,
        moment: Tensor,
        old_log_prob: Tensor,
        advantage: Tensor,
        replayed: Tensor | None,
        *,
        clip: tuple[float, float] | None,
        beta: float | None,
        entropy_coef: float,
        normalizer: Tensor,
        temperature: Tensor | None,
        softcapped: bool,
    ) -> PolicyRows:
        """`softmax.policy_rows`."""


class Passes(Protocol):
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


class ByTokenKernels:
    """What is done with tokens whose sums are known, for those operations that have kernels for it."""

    tokens: TokenKernels
    head: "ChunkedHead"

    def finished(self, sums: Sums) -> tuple[Statistics, LogProb]:
        """See `Passes`."""
        mean, log_prob, entropy = self.tokens.finish(sums.gap, sums.rest, sums.moment)
        return Statistics(sums.anchor, sums.gap, sums.rest, mean), LogProb(log_prob, entropy)

    def policy(
        self, sums: Sums, chunk: "Chunk", own: PolicyTokens, terms: "PolicyTerms", normalizer: Tensor
    ) -> PolicyRows:
        """See `Passes`."""
        return self.tokens.policy_rows(
            *sums[1:],
            *own,
            clip=terms.clip,
            beta=terms.beta,
            entropy_coef=terms.entropy_coef,
            normalizer=normalizer,
            temperature=chunk.temperature,
            softcapped=self.head.options.softcap is not None,
        )
