"""Sequences that share one row of tokens: indices of the tokens that attend to each other.

N tokens of the row, T targets. Only attention needs them: everything else in a transformer works token by token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import embedding_bag

SIMILAR = 0.6
"""Blocks are padded to the longest of those that have at least this fraction of its keys."""


@dataclass(frozen=True)
class Block:
    """Neighbouring tokens of one sequence, and the block that comes before them.

    Attributes:
        start: of the tokens in the row.
        length: number of tokens.
        before: a prompt, or what several prompts begin with; None: nothing.
    """

    start: int
    length: int
    before: "Block | None" = None

    @property
    def end(self) -> int:
        """Start of the next block."""
        return self.start + self.length

    @property
    def prefix(self) -> int:
        """Number of tokens of its sequence before it."""
        return 0 if self.before is None else self.before.seen

    @property
    def seen(self) -> int:
        """Number of tokens that its last one attends to."""
        return self.prefix + self.length

    @property
    def keys(self) -> npt.NDArray[np.int64]:
        """Places of the tokens that the block's last token attends to, in the order of positions."""
        own = np.arange(self.start, self.end)
        return own if self.before is None else np.concatenate([self.before.keys, own])


@dataclass(frozen=True, eq=False)
class Lookup:
    """Rows to take from a matrix, each any number of times.

    The gradient of a row is the sum of those of its copies, in fp32 and in their order. The backward of an embedding
    would sort the index in each layer on GPUs, and rounds each sum of two to 16 bits on CPUs.

    Attributes:
        index: [...] int64.
        rows: of the matrix.
    """

    index: torch.Tensor
    rows: int

    @cached_property
    def copies(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[index.numel()] places in the flat index, those of a row together; [rows + 1] where those of a row begin."""
        row, place = self.index.flatten().sort(stable=True)
        return place, torch.searchsorted(row, torch.arange(self.rows + 1, device=row.device))

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Return [..., D] the rows of [rows, D]."""
        taken: torch.Tensor = _Take.apply(states, self)
        return taken.unflatten(0, self.index.shape)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, lookup: Lookup) -> torch.Tensor:
        ctx.lookup = lookup
        return states.index_select(0, lookup.index.flatten())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        place, begin = ctx.lookup.copies
        return embedding_bag(place, gradient, begin, mode="sum", include_last_offset=True), None


@dataclass(frozen=True, eq=False)
class Bucket:
    """Blocks of about the same length, padded to n rows of Q new tokens that see K tokens.

    Attributes:
        query: [n, Q] places in the row; pads name some token.
        key: [n, K] likewise.
        position: [n, Q] int64, of the queries among their keys; pads have that of their block's last token.
        causal: True if nothing comes before any of the blocks. Then Q is K, and no mask is needed: no token attends
            to a pad.
    """

    query: Lookup
    key: Lookup
    position: torch.Tensor
    causal: bool

    @cached_property
    def before(self) -> torch.Tensor:
        """[n, 1, Q, K] bool: keys at or before a query; the same in all layers."""
        return self._places <= self.position[:, None, :, None]

    def seen(self, window: int | None) -> torch.Tensor:
        """[n, 1, Q, K] bool: the last `window` keys at or before a query."""
        if window is None:
            return self.before
        return self.before & (self._places > self.position[:, None, :, None] - window)

    @property
    def _places(self) -> torch.Tensor:
        return torch.arange(self.key.index.shape[1], device=self.key.index.device)


@dataclass(frozen=True, eq=False)
class Varlen:
    """Blocks without padding; their queries stand in the row one after another.

    Attributes:
        key: [M] places in the row of the keys of all blocks.
        query_ends, key_ends: [blocks + 1] int32, where the queries and keys of a block begin and end.
        most_queries, most_keys: of a block.
    """

    key: Lookup
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    most_queries: int
    most_keys: int


@dataclass(frozen=True, eq=False)
class Segments:
    """A row of tokens in parts.

    Attributes:
        position: [1, N] int64, of each token in its sequence.
        source: [T] which token predicts each target.
        buckets: all blocks, padded.
        place: [N] where a token stands among the queries of all buckets, flat.
        varlen: all blocks one after another, as flash attention takes them.
    """

    position: torch.Tensor
    source: Lookup
    buckets: tuple[Bucket, ...]
    place: Lookup
    varlen: Varlen


def segments(blocks: Sequence[Block], source: npt.NDArray[np.int64], device: torch.device) -> Segments:
    """Return the indices that attention needs for the blocks of a row, which follow one another without a gap.

    Args:
        blocks: in the order of the row.
        source: [T], which token predicts each target.
        device: where the tensors go.
    """
    position = np.concatenate([np.arange(block.prefix, block.prefix + block.length) for block in blocks])
    place = np.empty(len(position), np.int64)
    buckets, slots = [], 0
    for group in _similar(blocks):
        longest = max(block.length for block in group)
        for line, block in enumerate(group):
            place[block.start : block.end] = slots + line * longest + np.arange(block.length)
        slots += len(group) * longest
        buckets.append(_bucket(group, longest, len(position), device))
    of_tokens, of_targets, of_slots = moved(device, position[None], source, place)
    return Segments(
        of_tokens,
        Lookup(of_targets, len(position)),
        tuple(buckets),
        Lookup(of_slots, slots),
        _varlen(blocks, len(position), device),
    )


def _varlen(blocks: Sequence[Block], tokens: int, device: torch.device) -> Varlen:
    queries = [block.length for block in blocks]
    keys = [block.seen for block in blocks]
    ends = (np.cumsum([0, *lengths], dtype=np.int32) for lengths in (queries, keys))
    key, query_ends, key_ends = moved(device, np.concatenate([block.keys for block in blocks]), *ends)
    return Varlen(Lookup(key, tokens), query_ends, key_ends, max(queries), max(keys))


def moved(device: torch.device, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
    """Copy arrays to a device. From memory that is not pinned, a GPU would first do all that it has been given."""
    tensors = map(torch.from_numpy, arrays)
    return [(one.pin_memory() if device.type == "cuda" else one).to(device, non_blocking=True) for one in tensors]


def _similar(blocks: Sequence[Block]) -> list[list[Block]]:
    # What prompts begin with stands alone: the others are short, and would be padded to its length.
    begins = {block.before.before for block in blocks if block.before is not None}
    groups = [[block] for block in blocks if block in begins]
    alone = len(groups)
    for block in sorted((block for block in blocks if block not in begins), key=lambda block: -block.seen):
        if len(groups) > alone and block.seen >= SIMILAR * groups[-1][0].seen:
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def _bucket(blocks: Sequence[Block], longest: int, tokens: int, device: torch.device) -> Bucket:
    seen = blocks[0].seen
    query, position = np.empty((len(blocks), longest), np.int64), np.empty((len(blocks), longest), np.int64)
    key = np.empty((len(blocks), seen), np.int64)
    for line, block in enumerate(blocks):
        # A pad among the queries is the block's last token: no row may see nothing.
        own = np.minimum(np.arange(longest), block.length - 1)
        query[line], position[line] = block.start + own, block.prefix + own
        keys = block.keys
        key[line, : len(keys)], key[line, len(keys) :] = keys, keys[-1]
    causal = not any(block.prefix for block in blocks)
    of_queries, of_keys, at = moved(device, query, key, position)
    return Bucket(Lookup(of_queries, tokens), Lookup(of_keys, tokens), at, causal)
