"""The passes over allowed tokens as Triton kernels: see `allowed_kernels`."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from exgrpo.kernels.chunks.head import Chunk, ChunkedHead
from exgrpo.kernels.chunks.passes import Held
from exgrpo.kernels.chunks.softmax import Factors, Statistics, Sums
from exgrpo.kernels.torch_chunks.torch_allowed import AllowedPasses, PairGradient, Sets, reduced, sets_of
from exgrpo.kernels.triton_chunks import triton_tokens
from exgrpo.kernels.triton_chunks.allowed_kernels import (
    allowed_gradient_kernel,
    allowed_sums_kernel,
    pair_logits_kernel,
    pairs_kernel,
    segment_kernel,
)

ALLOWED_PART = 256
"""By arithmetic alone: the three products of a token with all words on an H100, and three readings of a row a pair."""
PAIRS, DEPTH, WARPS = 8, 256, 4
"""Pairs, and entries of their rows, that a program multiplies at once."""
BLOCK = 128
"""Pairs of a token that a program reads at once."""
LONGEST = 256
"""Pairs of a word that one program adds up; of a word with more, several do, and another one adds their sums."""
DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}


class TritonPairs(NamedTuple):
    """The pairs of a chunk."""

    sets: Sets
    row: Tensor
    """Row in the chunk of each pair, int32 [P]."""
    column: Tensor
    """Row of the weight of each pair, int32 [P]; -1 if another rank has it."""


class TritonAllowedPasses(AllowedPasses):
    """The passes over the pairs of a chunk: what is held are the pairs and their logits."""

    formulas = triton_tokens
    pair_bytes = 64
    blocks = 0  # nothing is gathered

    def __init__(self, head: ChunkedHead) -> None:
        super().__init__(head)
        if self.weight.stride(1) != 1:
            self.weight = self.weight.contiguous()
        if self.operand == self.weight.dtype == torch.bfloat16 and self.weight.is_cuda:
            self.written_once = self.operand
        bias, softcap = head.head.bias, head.options.softcap
        self.bias = None if bias is None else bias.contiguous()
        if bias is not None:
            self.pair_bytes = AllowedPasses.pair_bytes  # its gradient is plain PyTorch
        # By a tensor: a number would be rounded to float32 on its way.
        self.cap = None if softcap is None else self.weight.new_full((1,), softcap, dtype=self.compute)

    def chunk_forward(self, chunk: Chunk, *, gradient_follows: bool, with_entropy: bool = False) -> tuple[Sums, Held]:
        held, shard = self._pairs_and_logits(chunk), self.head.shard
        pairs, logits = held
        if not shard.group_name:
            return self._sums(chunk, pairs, logits, None), held
        (largest,) = shard.largest_of(reduced(logits, "max", pairs.sets))
        anchor, gap, rest, moment = self._sums(chunk, pairs, logits, largest)
        return Sums(anchor, *shard.largest_of(gap), *shard.sum_of(rest, moment)), held

    def chunk_gradient(
        self, chunk: Chunk, held: Held | None, statistics: Statistics, factors: Factors
    ) -> "TritonPairGradient":
        pairs, values = self._pairs_and_logits(chunk) if held is None else held
        upstream = factors.upstream
        with torch.cuda.device_of(values):
            allowed_gradient_kernel[(len(chunk.hidden),)](
                values,
                pairs.column,
                pairs.sets.bounds,
                chunk.target.local(),
                chunk.temperature,
                statistics.anchor.contiguous(),
                statistics.mean.contiguous(),
                factors.at_target.contiguous(),
                *((None, None) if upstream is None else (one.contiguous() for one in upstream)),
                self.cap,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
        return TritonPairGradient(self, chunk, pairs, values)

    def _pairs_and_logits(self, chunk: Chunk) -> tuple[TritonPairs, Tensor]:
        sets = sets_of(self.head, chunk)
        count, shard = int(sets.bounds[-1]), self.head.shard
        hidden = chunk.hidden.contiguous()
        pairs = TritonPairs(sets, *hidden.new_empty(2, count, dtype=torch.int32))
        logits = hidden.new_empty(count, dtype=self.compute)
        if count:
            with torch.cuda.device_of(logits):
                pairs_kernel[(len(hidden),)](
                    self.head.sets.ids.contiguous(),
                    *pairs.sets,
                    pairs.row,
                    pairs.column,
                    shard.offset,
                    shard.size,
                    BLOCK=BLOCK,
                    num_warps=WARPS,
                )
                pair_logits_kernel[(triton.cdiv(count, PAIRS),)](
                    hidden,
                    self.weight,
                    self.bias,
                    pairs.row,
                    pairs.column,
                    logits,
                    self.cap,
                    count,
                    hidden.shape[1],
                    hidden.stride(0),
                    self.weight.stride(0),
                    PAIRS=PAIRS,
                    DEPTH=DEPTH,
                    num_warps=WARPS,
                )
        return pairs, logits

    def _sums(self, chunk: Chunk, pairs: TritonPairs, logits: Tensor, given: Tensor | None) -> Sums:
        rows = len(chunk.hidden)
        sums = Sums(*logits.new_empty(4, rows))
        if rows:
            with torch.cuda.device_of(logits):
                allowed_sums_kernel[(rows,)](
                    logits,
                    pairs.column,
                    pairs.sets.bounds,
                    chunk.target.local(),
                    chunk.temperature,
                    given,
                    *sums,
                    BLOCK=BLOCK,
                    num_warps=WARPS,
                )
        return sums


class TritonPairGradient(NamedTuple):
    """A `products.LogitGradient` whose F are the numbers of pairs."""

    passes: TritonAllowedPasses
    chunk: Chunk
    pairs: TritonPairs
    values: Tensor

    def hidden_gradient(self) -> Tensor:
        weight, bounds = self.passes.weight, self.pairs.sets.bounds
        total = self.values.new_empty(len(bounds) - 1, weight.shape[1])
        places = torch.arange(len(total), device=total.device)
        segments = SegmentSums(weight, self.pairs.column, self.values, self.passes.operand)
        segments.add(bounds[:-1], bounds[1:], places, total, add=False)
        return total

    def add_weight_gradient(self, hidden: Tensor, factor: Tensor, total: Tensor, *, fresh: bool) -> None:
        if fresh:
            total.zero_()
        word, order = self.pairs.column.sort(stable=True)
        row = self.pairs.row[order]
        factors = self.values[order] * factor[row, 0]
        found, counts = word.unique_consecutive(return_counts=True)
        ends = counts.cumsum(0)
        begins = ends - counts
        if self.passes.head.shard.group_name:
            own = found >= 0
            found, counts, begins, ends = found[own], counts[own], begins[own], ends[own]
        found, long = found.long(), counts > LONGEST
        # Hidden states are rounded already, and sums of pieces stay as they are.
        segments = SegmentSums(hidden.contiguous(), row, factors, self.passes.compute)
        pieces = torch.where(long, (counts + LONGEST - 1) // LONGEST, 0)
        number = int(pieces.sum())
        if number:
            # Of these words each piece is added up into a row of its own first.
            piece = torch.repeat_interleave(pieces, output_size=number)
            last, places = pieces.cumsum(0), torch.arange(number, device=pieces.device)
            starts = begins[piece] + LONGEST * (places - (last - pieces)[piece])
            partial = self.values.new_empty(number, hidden.shape[1])
            segments.add(starts, torch.minimum(starts + LONGEST, ends[piece]), places, partial, add=False)
            which = long.nonzero().squeeze(1)
            of_pieces = SegmentSums(partial, places.int(), torch.ones_like(partial[:, 0]), self.passes.compute)
            of_pieces.add((last - pieces)[which], last[which], found[which], total, add=not fresh)
            found, begins, ends = found[~long], begins[~long], ends[~long]
        segments.add(begins, ends, found, total, add=not fresh)

    def add_bias_gradient(self, factor: Tensor, total: Tensor) -> None:
        PairGradient(self.passes, self.passes.pairs_of(self.chunk), self.values).add_bias_gradient(factor, total)


class SegmentSums(NamedTuple):
    """Rows of a matrix, in segments to be added up: one of the ``rows`` for each pair, times its factor."""

    matrix: Tensor
    rows: Tensor
    factors: Tensor
    operand: torch.dtype
    """Dtype to which the rows are rounded."""

    def add(self, begins: Tensor, ends: Tensor, places: Tensor, out: Tensor, *, add: bool) -> None:
        """Write the sum of each segment of pairs into the row of ``out`` at its place; ``add``: onto it."""
        if not len(begins):
            return
        with torch.cuda.device_of(out):
            segment_kernel[(len(begins), triton.cdiv(out.shape[1], DEPTH))](
                self.matrix,
                self.rows,
                self.factors,
                begins,
                ends,
                places,
                out,
                out.shape[1],
                self.matrix.stride(0),
                out.stride(0),
                ADD=add,
                OPERAND=DTYPES[self.operand],
                PAIRS=PAIRS,
                DEPTH=DEPTH,
                num_warps=WARPS,
            )
