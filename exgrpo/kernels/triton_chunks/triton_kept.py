"""The passes over kept sets as Triton kernels: see `kept_kernels`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from exgrpo.kernels.chunks.head import Chunk, ChunkedHead
from exgrpo.kernels.chunks.softmax import Factors, Statistics, Sums
from exgrpo.kernels.torch_chunks.torch_kept import KeptPasses, sets_of
from exgrpo.kernels.triton_chunks import triton_tokens
from exgrpo.kernels.triton_chunks.kept_kernels import (
    kept_gradient_kernel,
    kept_sums_kernel,
    pair_logits_kernel,
    pairs_kernel,
    segment_kernel,
)

KEPT_PART = 256
"""By arithmetic alone: the three products of a token with all words on an H100, and three readings of a row a pair."""
PAIRS, DEPTH, WARPS = 8, 256, 4
"""Pairs, and entries of their rows, that a program multiplies at once."""
BLOCK = 128
"""Pairs of a token that a program reads at once."""
LONGEST = 256
"""Pairs of a word that one program adds up; of a word with more, several do, and another one adds their sums."""
DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}


class TritonKeptPasses(KeptPasses):
    """The numbers of the pairs are their logits, then F."""

    formulas = triton_tokens
    pair_bytes = 64

    def __init__(self, head: ChunkedHead) -> None:
        super().__init__(head)
        if self.weight.stride(1) != 1:
            self.weight = self.weight.contiguous()
        if self.operand == self.weight.dtype == torch.bfloat16 and self.weight.is_cuda:
            self.written_once = self.operand
        bias, softcap = head.head.bias, head.options.softcap
        self.bias = None if bias is None else bias.contiguous()
        if bias is not None:
            self.pair_bytes = KeptPasses.pair_bytes  # its gradient is plain PyTorch
        # By a tensor: a number would be rounded to float32 on its way.
        self.cap = self.weight.new_full((1,), softcap or 1.0, dtype=self.compute)
        self.capped = softcap is not None

    def scratch(self) -> tuple[int, ...]:
        """See `KeptPasses`."""
        return ()

    def begin(self, chunk: Chunk) -> Tensor:
        """See `KeptPasses`."""
        self.sets, self.local = sets_of(self.head, chunk), chunk.target.local()
        pairs, kept, shard = int(self.sets.bounds[-1]), self.head.options.kept, self.head.shard
        assert kept is not None
        hidden = chunk.hidden.contiguous()
        self.rows, self.column = hidden.new_empty(2, pairs, dtype=torch.int32)
        logits = hidden.new_empty(pairs, dtype=self.compute)
        if pairs:
            with torch.cuda.device_of(logits):
                pairs_kernel[(len(self.local),)](
                    kept.ids.contiguous(),
                    *self.sets,
                    self.rows,
                    self.column,
                    shard.offset,
                    shard.size,
                    BLOCK=BLOCK,
                    num_warps=WARPS,
                )
                pair_logits_kernel[(triton.cdiv(pairs, PAIRS),)](
                    hidden,
                    self.weight,
                    self.weight if self.bias is None else self.bias,
                    self.rows,
                    self.column,
                    logits,
                    self.cap,
                    pairs,
                    hidden.shape[1],
                    hidden.stride(0),
                    self.weight.stride(0),
                    HAS_BIAS=self.bias is not None,
                    HAS_SOFTCAP=self.capped,
                    PAIRS=PAIRS,
                    DEPTH=DEPTH,
                    num_warps=WARPS,
                )
        return logits

    def sums(self, chunk: Chunk, *, gradient_follows: bool, with_entropy: bool = False) -> Sums:
        """See `Passes`."""
        self.values, shard = self.begin(chunk), self.head.shard
        if not shard.group_name:
            return self._sums(chunk, None)
        (largest,) = shard.largest_of(self._reduced(self.values, "max"))
        anchor, gap, rest, moment = self._sums(chunk, largest)
        return Sums(anchor, *shard.largest_of(gap), *shard.sum_of(rest, moment))

    def recall(self, chunk: Chunk, statistics: Statistics) -> None:
        """See `Passes`."""
        self.values = self.begin(chunk)

    def gradient(self, chunk: Chunk, statistics: Statistics, factors: Factors) -> Tensor:
        """See `Passes`."""
        upstream, at_target = factors.upstream, factors.at_target.contiguous()
        c, h = (at_target, at_target) if upstream is None else upstream
        assert h is not None
        with torch.cuda.device_of(self.values):
            kept_gradient_kernel[(len(self.local),)](
                self.values,
                self.column,
                self.sets.bounds,
                self.local,
                self._temperature(chunk),
                statistics.anchor.contiguous(),
                statistics.mean.contiguous(),
                at_target,
                c.contiguous(),
                h.contiguous(),
                self.cap,
                HAS_SOFTCAP=self.capped,
                PLAIN=upstream is None,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
        return self.values

    def hidden_gradient(self, grad_logits: Tensor) -> Tensor:
        """See `Products`."""
        rows = len(self.local)
        total = grad_logits.new_empty(rows, self.weight.shape[1])
        bounds = self.sets.bounds
        places = torch.arange(rows, device=total.device)
        self._add_segments(self.weight, self.column, grad_logits, bounds[:-1], bounds[1:], places, total, add=False)
        return total

    def add_weight_gradient(
        self, grad_logits: Tensor, hidden: Tensor, factor: Tensor, total: Tensor, *, fresh: bool
    ) -> None:
        """See `Products`."""
        if fresh:
            total.zero_()
        word, order = self.column.sort(stable=True)
        row = self.rows[order]
        factors = grad_logits[order] * factor[row, 0]
        found, counts = word.unique_consecutive(return_counts=True)
        ends = counts.cumsum(0)
        begins = ends - counts
        if self.head.shard.group_name:
            own = found >= 0
            found, counts, begins, ends = found[own], counts[own], begins[own], ends[own]
        found = found.long()
        hidden, long = hidden.contiguous(), counts > LONGEST
        pieces = torch.where(long, (counts + LONGEST - 1) // LONGEST, 0)
        number = int(pieces.sum())
        if number:
            # Of these words each piece is added up into a row of its own first.
            piece = torch.repeat_interleave(pieces, output_size=number)
            last = pieces.cumsum(0)
            starts = begins[piece] + LONGEST * (torch.arange(number, device=piece.device) - (last - pieces)[piece])
            partial = grad_logits.new_empty(number, hidden.shape[1])
            places = torch.arange(number, device=piece.device)
            stops = torch.minimum(starts + LONGEST, ends[piece])
            self._add_segments(hidden, row, factors, starts, stops, places, partial, add=False)
            which = long.nonzero().squeeze(1)
            ones = torch.ones_like(partial[:, 0])
            bounds = (last - pieces)[which], last[which]
            self._add_segments(partial, places.int(), ones, *bounds, found[which], total, add=not fresh)
            found, begins, ends = found[~long], begins[~long], ends[~long]
        self._add_segments(hidden, row, factors, begins, ends, found, total, add=not fresh)

    def add_bias_gradient(self, grad_logits: Tensor, factor: Tensor, total: Tensor) -> None:
        """See `Products`."""
        self.find_pairs()
        super().add_bias_gradient(grad_logits, factor, total)

    def _add_segments(
        self,
        matrix: Tensor,
        index: Tensor,
        factors: Tensor,
        begins: Tensor,
        ends: Tensor,
        places: Tensor,
        out: Tensor,
        *,
        add: bool,
    ) -> None:
        """The sums of segments of pairs into, or onto, rows of ``out``."""
        if not len(begins):
            return
        # A weight alone is rounded here: hidden states are already, and sums of pieces stay as they are.
        operand = self.operand if matrix is self.weight else self.compute
        with torch.cuda.device_of(out):
            segment_kernel[(len(begins), triton.cdiv(out.shape[1], DEPTH))](
                matrix,
                index,
                factors,
                begins,
                ends,
                places,
                out,
                out.shape[1],
                matrix.stride(0),
                out.stride(0),
                ADD=add,
                OPERAND=DTYPES[operand],
                PAIRS=PAIRS,
                DEPTH=DEPTH,
                num_warps=WARPS,
            )

    def _sums(self, chunk: Chunk, given: Tensor | None) -> Sums:
        rows = len(self.local)
        sums = Sums(*self.values.new_empty(4, rows))
        if rows:
            with torch.cuda.device_of(self.values):
                kept_sums_kernel[(rows,)](
                    self.values,
                    self.column,
                    self.sets.bounds,
                    self.local,
                    self._temperature(chunk),
                    sums.anchor if given is None else given,
                    *sums,
                    GIVEN=given is not None,
                    BLOCK=BLOCK,
                    num_warps=WARPS,
                )
        return sums

    def _temperature(self, chunk: Chunk) -> Tensor:
        return self.values.new_ones(len(self.local)) if chunk.temperature is None else chunk.temperature
