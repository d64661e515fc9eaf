"""Protocols of a backend: the passes over the logits of a chunk, and the small operations around the head."""

from bisect import bisect_right
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from exgrpo.kernels.chunks import chunking, softmax
from exgrpo.kernels.chunks.chunking import Cost
from exgrpo.kernels.chunks.head import Chunk, ChunkedHead
from exgrpo.kernels.chunks.products import LogitGradient, row_cost
from exgrpo.kernels.chunks.softmax import Factors, PolicyRows, RowTerms, Statistics, Sums
from exgrpo.kernels.inputs import LogProb, PolicyTokens, ScoredTokens, Surrogate
from exgrpo.kernels.objective import TokenObjective

Held = Any
"""Numbers of a chunk between `chunk_forward` and `chunk_gradient`, of the backend's own type."""


class Passes(Protocol):
    """The passes over a chunk's logits [rows, V]; each call makes them anew.

    They keep nothing of a chunk but scratch memory, which the next `chunk_forward` overwrites.
    """

    tile: int
    """Tokens that the products compute together: a chunk has whole tiles of them."""

    block: int | None
    """Rows that are moved at once where rows without a gradient are taken out of what is held, a matrix; None: they
    are not taken out."""

    written_once: torch.dtype
    """Dtype of a weight gradient that no chunk is added to."""

    def chunk_rows(self, *, gradient_follows: bool) -> int:
        """Return the tokens of a chunk at most: as many as the memory of the call allows."""

    def slice_columns(self) -> int:
        """Return the entries of the vocabulary that all active rows may meet at once; 0: none.

        `chunk_gradient` returns a `MatrixGradient` then.
        """

    def chunk_forward(self, chunk: Chunk, *, gradient_follows: bool, with_entropy: bool = False) -> tuple[Sums, Held]:
        """Return the sums of each row over the whole vocabulary, and what `chunk_gradient` needs if it follows."""

    def finished(self, sums: Sums) -> tuple[Statistics, LogProb]:
        """Return statistics, log-probabilities and entropies."""

    def policy(
        self, sums: Sums, chunk: Chunk, held: Held, tokens: PolicyTokens, terms: RowTerms, out: Tensor
    ) -> PolicyRows:
        """Compute the objective of a chunk's tokens and the factors of its gradient into ``out`` [9, rows]."""

    def chunk_gradient(
        self, chunk: Chunk, held: Held | None, statistics: Statistics, factors: Factors
    ) -> LogitGradient:
        """Return F [rows, V]: the gradient of the raw products is r[:, None] * F. None: the logits are formed anew."""


PassesOf = Callable[[ChunkedHead], Passes]
"""Make the passes for a head."""


class Backend(Protocol):
    """A module of plain functions; all inputs are checked already."""

    def passes_of(self, head: ChunkedHead) -> Passes:
        """Make the passes over the logits of a head."""

    def allowed_passes_of(self, head: ChunkedHead) -> Passes:
        """Make the passes over the logits of allowed tokens alone, where the tokens that take part have one."""

    def masked_passes_of(self, head: ChunkedHead) -> Passes:
        """Make the passes over all logits of tokens with allowed tokens, which take those beside the sets out."""

    ALLOWED_PART: int
    """Sets of more than one part of so many of the vocabulary are for `masked_passes_of`."""

    def token_objective(self, scored: ScoredTokens, surrogate: Surrogate) -> TokenObjective:
        """Return the objective of tokens whose log-probabilities are known."""

    def centre_groups(self, reward: Tensor, group: Tensor, scale_by_std: bool) -> Tensor:
        """Return reward [N] minus the mean of its group in float64, divided by the sample deviation if asked for."""

    def scale(self, values: Tensor, factor: Tensor) -> None:
        """Multiply contiguous values in place by a factor [] that is on their device."""

    def segment_mean(self, values: Tensor, counted: Tensor, offsets: Tensor) -> Tensor:
        """Return the mean of the counted values of each segment."""


def columns_within(head: ChunkedHead, memory: int, cost: Callable[[int], Cost]) -> int:
    """Entries of the vocabulary, whole tiles, that all active rows of a walk meet at once in so many bytes; 0: none.

    ``cost`` returns that of a walk through chunks of rows over so many entries. All rows have their hidden states
    scaled; gathered, too, with their gradient, where they are some of the tokens; and in the slower products a part
    of that.
    """
    operand, width, tile = head.options.operand, head.head.weight.shape[1], chunking.TILE_COLUMNS
    some, narrow, wide = head.order is not None, operand.itemsize, head.dtype.itemsize
    row = narrow * (1 + (some or head.head.hidden.dtype != operand)) + wide * (some + (not head.products.mixed))
    row = width * row - row_cost(operand, width, 0)
    fixed = cost(head.shard.largest).fixed + chunking.TOKEN_BYTES * head.head.target.numel()

    def bytes_of(tiles: int) -> int:
        found = cost(tile * tiles)
        return fixed + (found.row + row) * head.active + sum(min(n, memory // chunking.SHARE) for n in found.scratch)

    return tile * bisect_right(range(1, head.shard.size // tile + 1), memory, key=bytes_of)


class ByFormulas:
    """The passes that read no logits, by the functions `finished` and `policy_rows` of a module."""

    formulas: ModuleType = softmax

    def slice_columns(self) -> int:
        return 0

    def finished(self, sums: Sums) -> tuple[Statistics, LogProb]:
        return self.formulas.finished(sums)

    def policy(
        self, sums: Sums, chunk: Chunk, held: Held, tokens: PolicyTokens, terms: RowTerms, out: Tensor
    ) -> PolicyRows:
        return self.formulas.policy_rows(sums, tokens, terms, chunk.temperature, out)
