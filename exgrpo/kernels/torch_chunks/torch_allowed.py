"""Sets of allowed tokens in plain PyTorch: one product per pair of a token and an id, or all logits for a large set.

The numbers of a chunk's pairs are a vector, where those of other passes are a matrix: exp(d), then F. What is gathered
for the pairs, a row of the weight or a hidden state, is there for some of them at a time. Gradients are sums over
segments of sorted pairs, the same on every run.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from exgrpo.kernels.chunks import chunking
from exgrpo.kernels.chunks.chunking import Cost
from exgrpo.kernels.chunks.head import Chunk, ChunkedHead
from exgrpo.kernels.chunks.passes import ByFormulas, Held
from exgrpo.kernels.chunks.products import LogitGradient
from exgrpo.kernels.chunks.softmax import UNDERFLOWN, Factors, Statistics, Sums
from exgrpo.kernels.torch_chunks.torch_passes import TorchPasses

ALLOWED_PART = 64
"""On a 2-core CPU, width 896 and 49,152 words: from a 75th of them on, all logits are faster than gathered rows."""


class Sets(NamedTuple):
    """The sets of some rows, which end to end are pairs of a row and a word, [P]."""

    starts: Tensor
    """[rows] int64: where each set starts among the ids of the call."""
    bounds: Tensor
    """[rows + 1] int64: row i has the pairs [bounds[i], bounds[i + 1]), and none if its set has one word."""


class Pairs(NamedTuple):
    """The pairs of a chunk."""

    sets: Sets
    row: Tensor
    """Row in the chunk of each pair, [P]."""
    word: Tensor
    """Row of the weight of each pair, [P]."""
    held: Tensor | None
    """True if the word is in this rank's part, bool [P]; None: all are."""
    targets: Tensor
    """Pairs whose word is the target of their row."""


class AllowedPasses(ByFormulas):
    """The passes over the pairs of a chunk: what is held are the pairs, and exp(d) of each, 0 at the targets."""

    block = None  # a row without a gradient has factor 0, and few pairs
    tile = 1
    pair_bytes = 96
    """All vectors over the pairs of a chunk that exist at once, with indices in int64."""
    blocks = 4
    """Of gathered rows that exist at once: both factors of a product, each as stored and in its dtype."""

    def __init__(self, head: ChunkedHead) -> None:
        self.head = head
        self.operand, self.compute = head.options.operand, head.dtype
        self.written_once = self.compute
        self.weight = head.head.weight
        self.pairs, self.most = extent(head)
        """Number of all rows' pairs, and of one row's at most."""

    def chunk_rows(self, *, gradient_follows: bool) -> int:
        memory, tokens, device = self.head.options.memory, self.head.head.target.numel(), self.weight.device
        if memory is None:
            most = chunking.of_device(chunking.CHUNK_BYTES, device) // self.pair_bytes
            return max(1, tokens if self.pairs <= most else most // self.most)
        row = self.pair_bytes * self.most + chunking.ROW_BYTES
        row += self.weight.shape[1] * (self.operand.itemsize + 2 * self.compute.itemsize)
        scratch = self.blocks * (chunking.of_device(chunking.BLOCK_BYTES, device),)
        return min(max(1, tokens), chunking.rows_within(memory, tokens, Cost(0, row, scratch)))

    def pairs_of(self, chunk: Chunk) -> Pairs:
        """Return the pairs of a chunk."""
        sets = sets_of(self.head, chunk)
        sizes = sets.bounds.diff()
        row = torch.repeat_interleave(sizes)
        shift = sets.starts - sets.bounds[:-1]
        ids = self.head.sets.ids[torch.arange(len(row), device=sizes.device) + shift[row]]
        word, held = self.head.shard.locate(ids.long())
        is_target = ids == self.head.of_tokens(self.head.head.target, chunk.rows)[row]
        targets = (is_target if held is None else is_target & held).nonzero().squeeze(1)
        return Pairs(sets, row, word, held, targets)

    def logits(self, chunk: Chunk, pairs: Pairs) -> Tensor:
        """Return the logit of each pair; -inf for the words of other ranks."""
        logits = self._dots(chunk.hidden, pairs)
        bias, softcap = self.head.head.bias, self.head.options.softcap
        if bias is not None and len(bias):
            logits += bias[pairs.word]
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        return logits if pairs.held is None else logits.masked_fill_(~pairs.held, -torch.inf)

    def chunk_forward(self, chunk: Chunk, *, gradient_follows: bool, with_entropy: bool = False) -> tuple[Sums, Held]:
        pairs, shard = self.pairs_of(chunk), self.head.shard
        logits = self.logits(chunk, pairs)
        at_target = logits.new_full((len(chunk.hidden),), -torch.inf)
        at_target[pairs.row[pairs.targets]] = logits[pairs.targets]
        anchor, at_target = shard.largest_of(reduced(logits, "max", pairs.sets), at_target)
        alone = pairs.sets.bounds.diff() == 0
        anchor, at_target = anchor.masked_fill(alone, 0), at_target.masked_fill(alone, 0)
        d = distances(logits, pairs, anchor, chunk.temperature)
        values = d.exp()
        values[pairs.targets] = 0
        rest, moment = shard.sum_of(reduced(values, "sum", pairs.sets), reduced(d * values, "sum", pairs.sets))
        return Sums(anchor, chunk.tempered(at_target - anchor), rest, moment), (pairs, values)

    def chunk_gradient(
        self, chunk: Chunk, held: Held | None, statistics: Statistics, factors: Factors
    ) -> LogitGradient:
        if held is None:
            pairs = self.pairs_of(chunk)
            values = distances(self.logits(chunk, pairs), pairs, statistics.anchor, chunk.temperature).exp_()
            values[pairs.targets] = 0
        else:
            pairs, values = held
        upstream, softcap = factors.upstream, self.head.options.softcap
        row, own = pairs.row, pairs.row[pairs.targets]
        slope = None
        if upstream is not None:
            d = values.log().clamp_(min=UNDERFLOWN)
            values *= upstream.log_prob[row] + upstream.entropy[row] * (d - statistics.mean[row])
            if softcap is not None:
                d[pairs.targets] = statistics.gap[own]
                capped = d if chunk.temperature is None else d * chunk.temperature[row]
                slope = 1 - ((capped + statistics.anchor[row]) / softcap).square()
        values[pairs.targets] = factors.at_target[own]
        return PairGradient(self, pairs, values if slope is None else values.mul_(slope))

    def gathered(self, matrix: Tensor, index: Tensor) -> Tensor:
        """Return rows of a matrix, rounded to the operands' dtype; never the matrix itself."""
        return matrix[index].to(self.operand).to(self.compute)

    def tiles(self, pairs: int) -> list[tuple[int, int]]:
        """Return spans of pairs whose rows are gathered at once."""
        row = self.weight.shape[1] * self.compute.itemsize
        return list(chunking.spans(pairs, chunking.block_rows(row, self.weight.device, self.head.options.memory)))

    def _dots(self, hidden: Tensor, pairs: Pairs) -> Tensor:
        out = hidden.new_zeros(len(pairs.row), dtype=self.compute)
        if len(self.weight):
            for start, end in self.tiles(len(pairs.row)):
                words = self.gathered(self.weight, pairs.word[start:end])
                terms = words.mul_(hidden[pairs.row[start:end]])
                torch.sum(terms, 1, out=out[start:end])
        return out


class PairGradient(NamedTuple):
    """A `products.LogitGradient` whose F are the numbers of pairs."""

    passes: AllowedPasses
    pairs: Pairs
    values: Tensor

    def hidden_gradient(self) -> Tensor:
        total = self.values.new_zeros(len(self.pairs.sets.starts), self.passes.weight.shape[1])
        self._add(total, self.pairs.row, self.passes.weight, self.pairs.word, self.values)
        return total

    def add_weight_gradient(self, hidden: Tensor, factor: Tensor, total: Tensor, *, fresh: bool) -> None:
        if fresh:
            total.zero_()
        word, order = self.pairs.word.sort(stable=True)
        row = self.pairs.row[order]
        self._add(total, word, hidden, row, self.values[order] * factor[row, 0])

    def add_bias_gradient(self, factor: Tensor, total: Tensor) -> None:
        word, order = self.pairs.word.sort(stable=True)
        found, counts = word.unique_consecutive(return_counts=True)
        values, held = self.values * factor[self.pairs.row], self.pairs.held
        values = (values if held is None else values.masked_fill_(~held, 0))[order]
        if len(total):
            total[found] += torch.segment_reduce(values, "sum", lengths=counts, unsafe=True)

    def _add(self, total: Tensor, key: Tensor, matrix: Tensor, index: Tensor, factor: Tensor) -> None:
        """Add to each row of ``total`` the rows of ``matrix`` at the ``index`` of its pairs, times their factors.

        The pairs [P] are sorted by their ``key``, a row of ``total``.
        """
        if not len(matrix) or not len(total):
            return
        for start, end in self.passes.tiles(len(key)):
            rows, counts = key[start:end].unique_consecutive(return_counts=True)
            terms = self.passes.gathered(matrix, index[start:end]) * factor[start:end].unsqueeze(1)
            total[rows] += torch.segment_reduce(terms, "sum", lengths=counts, axis=0, unsafe=True)


def distances(logits: Tensor, pairs: Pairs, anchor: Tensor, temperature: Tensor | None) -> Tensor:
    """Turn logits into d, in place, and return it."""
    logits -= anchor[pairs.row]
    if temperature is not None:
        logits /= temperature[pairs.row]
    return logits.clamp_(min=UNDERFLOWN)


def reduced(values: Tensor, how: str, sets: Sets) -> Tensor:
    """Return the sum or the largest of each row's values; 0 or -inf of none."""
    initial = 0.0 if how == "sum" else -torch.inf
    return torch.segment_reduce(values, how, offsets=sets.bounds, initial=initial, unsafe=True)


def sets_of(walk: ChunkedHead, chunk: Chunk) -> Sets:
    """Return the sets of a chunk's rows."""
    offsets = walk.sets.offsets
    starts, ends = (walk.of_tokens(values, chunk.rows) for values in (offsets[:-1], offsets[1:]))
    sizes = ends - starts
    bounds = sizes.new_zeros(len(sizes) + 1)
    torch.cumsum(sizes.masked_fill(sizes == 1, 0), 0, out=bounds[1:])
    return Sets(starts, bounds)


def extent(walk: ChunkedHead) -> tuple[int, int]:
    """Return the number of pairs of a walk, and of one row at most. Waits for the device."""
    if not walk.count:
        return 0, 0
    sizes = walk.of_tokens(walk.sets.offsets.diff())
    pairs, most = torch.stack((sizes.sum(), sizes.max())).tolist()
    return pairs, most


class MaskedPasses(TorchPasses):
    """The passes over rows whose sets are large: all logits, -inf beside the set."""

    def slice_columns(self) -> int:
        return 0  # the host goes through the sets of each chunk

    def logits(self, chunk: Chunk) -> Tensor:
        logits = super().logits(chunk)
        (ids, offsets), shard = self.head.sets, self.head.shard
        starts, ends = (self.head.of_tokens(x, chunk.rows).tolist() for x in (offsets[:-1], offsets[1:]))
        for row, start, end in zip(logits, starts, ends, strict=True):
            word, held = shard.locate(ids[start:end].long())
            word = word if held is None else word[held]
            values = row[word]
            row.fill_(-torch.inf)[word] = values
        return logits
