"""Kept sets in plain PyTorch: a product for each pair of a token and a word of its set, or for a large set all of them.

The numbers of a chunk's pairs are a vector, where those of other passes are a matrix: exp(d), then F. What is gathered
for the pairs, a row of the weight or a hidden state, is there for some of them at a time. Gradients are sums over
segments of sorted pairs, the same on every run.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from exgrpo.kernels.chunks import chunking, softmax
from exgrpo.kernels.chunks.chunking import Cost
from exgrpo.kernels.chunks.head import Chunk, ChunkedHead
from exgrpo.kernels.chunks.passes import ByFormulas, Formulas
from exgrpo.kernels.chunks.products import Products
from exgrpo.kernels.chunks.softmax import UNDERFLOWN, Factors, Statistics, Sums
from exgrpo.kernels.torch_chunks.torch_passes import TorchPasses

KEPT_PART = 64
"""On a 2-core CPU, width 896 and 49,152 words: from a 75th of them on, all logits are faster than gathered rows."""
PAIR_BYTES = 96
"""Of the vectors over the pairs of a chunk that exist at once, indices in int64."""
TILES = 4
"""Of gathered rows that exist at once: those of a product's two factors, as they are stored and in its dtype."""


class Sets(NamedTuple):
    """The sets of some rows, which end to end are pairs of a row and a word, [P]."""

    starts: Tensor
    """[rows] int64: where each set starts among the ids of the call."""
    bounds: Tensor
    """[rows + 1] int64: row i has the pairs [bounds[i], bounds[i + 1]), and none if its set has one word."""


class KeptPasses(ByFormulas, Products):
    """Both the passes and the products of what they return: all work on the pairs of the chunk at hand."""

    formulas: Formulas = softmax
    compacts = False
    """A row without a gradient has factor 0, and few pairs."""
    tile = 1
    pair_bytes = PAIR_BYTES

    def __init__(self, head: ChunkedHead) -> None:
        self.head = head
        self.operand, self.compute = head.options.operand, head.dtype
        self.mixed = False
        self.written_once = self.compute
        self.weight = head.head.weight
        self.pairs, self.most = extent(head)
        """Of all rows, and of one row at most."""
        self.products: Products = self
        self.sets = Sets(self.weight.new_empty(0), self.weight.new_empty(0))
        """Of the chunk at hand."""
        self.values = self.weight.new_empty(0)
        """exp(d) of its pairs, 0 at the targets."""

    def chunk_rows(self, *, gradient_follows: bool) -> int:
        """See `Passes`."""
        memory, tokens, device = self.head.options.memory, self.head.head.target.numel(), self.weight.device
        if memory is None:
            most = chunking.of_device(chunking.CHUNK_BYTES, device) // self.pair_bytes
            return max(1, tokens if self.pairs <= most else most // self.most)
        row = self.pair_bytes * self.most + chunking.ROW_BYTES
        row += self.weight.shape[1] * (self.operand.itemsize + 2 * self.compute.itemsize)
        return min(max(1, tokens), chunking.rows_within(memory, tokens, Cost(0, row, self.scratch())))

    def scratch(self) -> tuple[int, ...]:
        """Blocks that exist at once, see `Cost`."""
        return TILES * (chunking.of_device(chunking.BLOCK_BYTES, self.weight.device),)

    def begin(self, chunk: Chunk) -> Tensor:
        """The logits of a chunk's pairs; -inf for the words of other ranks."""
        self.sets = sets_of(self.head, chunk)
        ids = self.find_pairs()
        target = self.head.of_tokens(self.head.head.target, chunk.rows)
        is_target = ids == target[self.row]
        self.at_target = (is_target if self.held is None else is_target & self.held).nonzero().squeeze(1)
        logits = self._dots(chunk.hidden)
        bias, softcap = self.head.head.bias, self.head.options.softcap
        if bias is not None and len(bias):
            logits += bias[self.word]
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        return logits if self.held is None else logits.masked_fill_(~self.held, -torch.inf)

    def find_pairs(self) -> Tensor:
        """The pairs of the sets at hand: their words [P], over the whole vocabulary."""
        kept = self.head.options.kept
        assert kept is not None
        sizes = self.sets.bounds.diff()
        self.row = torch.repeat_interleave(sizes)
        """Of each pair, in the chunk."""
        shift = self.sets.starts - self.sets.bounds[:-1]
        ids = kept.ids[torch.arange(len(self.row), device=sizes.device) + shift[self.row]]
        self.word, self.held = self.head.shard.locate(ids.long())
        """Of each pair, a row of the weight, and whether it is in this rank's part."""
        return ids

    def sums(self, chunk: Chunk, *, gradient_follows: bool, with_entropy: bool = False) -> Sums:
        """See `Passes`."""
        logits, shard = self.begin(chunk), self.head.shard
        at_target = logits.new_full((len(chunk.hidden),), -torch.inf)
        at_target[self.row[self.at_target]] = logits[self.at_target]
        anchor, at_target = shard.largest_of(self._reduced(logits, "max"), at_target)
        alone = self.sets.bounds.diff() == 0
        anchor, at_target = anchor.masked_fill(alone, 0), at_target.masked_fill(alone, 0)
        d = self._distances(logits, anchor, chunk.temperature)
        self.values = d.exp()
        self.values[self.at_target] = 0
        rest, moment = shard.sum_of(self._reduced(self.values, "sum"), self._reduced(d * self.values, "sum"))
        gap = at_target - anchor
        return Sums(anchor, gap if chunk.temperature is None else gap / chunk.temperature, rest, moment)

    def recall(self, chunk: Chunk, statistics: Statistics) -> None:
        """See `Passes`."""
        self.values = self._distances(self.begin(chunk), statistics.anchor, chunk.temperature).exp_()
        self.values[self.at_target] = 0

    def select(self, kept: Tensor) -> None:
        """See `Passes`."""
        raise NotImplementedError("it does not compact")

    def gradient(self, chunk: Chunk, statistics: Statistics, factors: Factors) -> Tensor:
        """See `Passes`: F of the pairs."""
        values, upstream, softcap = self.values, factors.upstream, self.head.options.softcap
        row, own = self.row, self.row[self.at_target]
        slope = None
        if upstream is not None:
            assert upstream.entropy is not None
            d = values.log().clamp_(min=UNDERFLOWN)
            values *= upstream.log_prob[row] + upstream.entropy[row] * (d - statistics.mean[row])
            if softcap is not None:
                d[self.at_target] = statistics.gap[own]
                capped = d if chunk.temperature is None else d * chunk.temperature[row]
                slope = 1 - ((capped + statistics.anchor[row]) / softcap).square()
        values[self.at_target] = factors.at_target[own]
        return values if slope is None else values.mul_(slope)

    def hidden_gradient(self, grad_logits: Tensor) -> Tensor:
        """See `Products`."""
        total = grad_logits.new_zeros(len(self.sets.starts), self.weight.shape[1])
        self._add(total, self.row, self.weight, self.word, grad_logits)
        return total

    def add_weight_gradient(
        self, grad_logits: Tensor, hidden: Tensor, factor: Tensor, total: Tensor, *, fresh: bool
    ) -> None:
        """See `Products`."""
        if fresh:
            total.zero_()
        word, order = self.word.sort(stable=True)
        row = self.row[order]
        self._add(total, word, hidden, row, grad_logits[order] * factor[row, 0])

    def add_bias_gradient(self, grad_logits: Tensor, factor: Tensor, total: Tensor) -> None:
        """See `Products`."""
        word, order = self.word.sort(stable=True)
        found, counts = word.unique_consecutive(return_counts=True)
        values = grad_logits * factor[self.row]
        values = (values if self.held is None else values.masked_fill_(~self.held, 0))[order]
        if len(total):
            total[found] += torch.segment_reduce(values, "sum", lengths=counts, unsafe=True)

    def _add(self, total: Tensor, key: Tensor, matrix: Tensor, index: Tensor, factor: Tensor) -> None:
        """Adds to each row of ``total`` the rows of ``matrix`` at the ``index`` of its pairs, times their factors.

        The pairs [P] are sorted by their ``key``, a row of ``total``.
        """
        if not len(matrix) or not len(total):
            return
        for start, end in self._tiles(len(key)):
            rows, counts = key[start:end].unique_consecutive(return_counts=True)
            terms = self._gathered(matrix, index[start:end]) * factor[start:end].unsqueeze(1)
            total[rows] += torch.segment_reduce(terms, "sum", lengths=counts, axis=0, unsafe=True)

    def _dots(self, hidden: Tensor) -> Tensor:
        """The raw product of each pair."""
        out = hidden.new_zeros(len(self.row), dtype=self.compute)
        if len(self.weight):
            for start, end in self._tiles(len(self.row)):
                words = self._gathered(self.weight, self.word[start:end])
                terms = words.mul_(hidden[self.row[start:end]])
                torch.sum(terms, 1, out=out[start:end])
        return out

    def _gathered(self, matrix: Tensor, index: Tensor) -> Tensor:
        """Rows of a matrix, rounded to the operands' dtype; never the matrix itself."""
        return matrix[index].to(self.operand).to(self.compute)

    def _tiles(self, pairs: int) -> "list[tuple[int, int]]":
        row = self.weight.shape[1] * self.compute.itemsize
        return list(chunking.spans(pairs, chunking.block_rows_of(row, self.weight.device, self.head.options.memory)))

    def _distances(self, logits: Tensor, anchor: Tensor, temperature: Tensor | None) -> Tensor:
        """d of each pair, in place."""
        logits -= anchor[self.row]
        if temperature is not None:
            logits /= temperature[self.row]
        return logits.clamp_(min=UNDERFLOWN)

    def _reduced(self, values: Tensor, how: str) -> Tensor:
        """The sum or the largest of each row's values; 0 or -inf of none."""
        initial = 0.0 if how == "sum" else -torch.inf
        return torch.segment_reduce(values, how, offsets=self.sets.bounds, initial=initial, unsafe=True)


def sets_of(walk: ChunkedHead, chunk: Chunk) -> Sets:
    """The sets of a chunk's rows."""
    kept = walk.options.kept
    assert kept is not None
    starts, ends = (walk.of_tokens(values, chunk.rows) for values in (kept.offsets[:-1], kept.offsets[1:]))
    sizes = ends - starts
    bounds = sizes.new_zeros(len(sizes) + 1)
    torch.cumsum(sizes.masked_fill(sizes == 1, 0), 0, out=bounds[1:])
    return Sets(starts, bounds)


def extent(walk: ChunkedHead) -> tuple[int, int]:
    """How many pairs the rows of a walk have, and how many one row has at most. Waits for the device."""
    if not walk.count:
        return 0, 0
    kept = walk.options.kept
    assert kept is not None
    sizes = walk.of_tokens(kept.offsets.diff())
    pairs, most = torch.stack((sizes.sum(), sizes.max())).tolist()
    return pairs, most


class MaskedPasses(TorchPasses):
    """Of rows whose sets are large: all logits, -inf beside the set."""

    def _logits(self, chunk: Chunk) -> Tensor:
        logits = super()._logits(chunk)
        kept, shard = self.head.options.kept, self.head.shard
        assert kept is not None
        starts, ends = (self.head.of_tokens(x, chunk.rows).tolist() for x in (kept.offsets[:-1], kept.offsets[1:]))
        for row, start, end in zip(logits, starts, ends, strict=True):
            word, held = shard.locate(kept.ids[start:end].long())
            word = word if held is None else word[held]
            values = row[word]
            row.fill_(-torch.inf)[word] = values
        return logits
