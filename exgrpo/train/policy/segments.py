"""Sequences that share one row of tokens: which tokens see each other, as indices.

N tokens of the row, T targets. Attention alone needs to know: everything else in a transformer works token by token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_SIMILAR = 0.6
"""Blocks are padded to the longest of those that have at least this fraction of its keys."""


@dataclass(frozen=True)
class Block:
    """Neighbouring tokens of one sequence, and where the prompt stands that comes before them.

    Attributes:
        start: of the tokens in the row.
        length: number of tokens.
        prefix_start: of the prompt in the row.
        prefix: tokens of the prompt; 0: nothing comes before.
    """

    start: int
    length: int
    prefix_start: int
    prefix: int

    @property
    def keys(self) -> npt.NDArray[np.int64]:
        """What the block's last token sees, in the order of positions."""
        before = np.arange(self.prefix_start, self.prefix_start + self.prefix)
        return np.concatenate([before, np.arange(self.start, self.start + self.length)])


@dataclass(frozen=True, eq=False)
class Bucket:
    """Blocks of about the same length, padded to n rows of Q new tokens that see K tokens.

    Attributes:
        query: [n, Q] int64, places in the row; pads name some token.
        key: [n, K] int64, likewise.
        distance: [n, Q, K] int64, by how many positions a key comes before a query; negative where it is not seen.
    """

    query: torch.Tensor
    key: torch.Tensor
    distance: torch.Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """A row of tokens in parts.

    Attributes:
        position: [1, N] int64, of each token in its sequence.
        source: [T] int64, which token predicts each target.
        buckets: all blocks.
        place: [N] int64, where a token stands among the queries of all buckets, flat.
    """

    position: torch.Tensor
    source: torch.Tensor
    buckets: tuple[Bucket, ...]
    place: torch.Tensor


def segments(blocks: Sequence[Block], source: npt.NDArray[np.int64], device: torch.device) -> Segments:
    """What attention has to know about the blocks of a row, which follow one another without a gap.

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
            place[block.start : block.start + block.length] = slots + line * longest + np.arange(block.length)
        slots += len(group) * longest
        buckets.append(_bucket(group, longest, device))
    whole = (torch.from_numpy(array).to(device, non_blocking=True) for array in (position[None], source, place))
    of_tokens, of_targets, of_slots = whole
    return Segments(of_tokens, of_targets, tuple(buckets), of_slots)


def _similar(blocks: Sequence[Block]) -> list[list[Block]]:
    groups: list[list[Block]] = []
    for block in sorted(blocks, key=lambda block: -block.prefix - block.length):
        if groups and block.prefix + block.length >= _SIMILAR * (groups[-1][0].prefix + groups[-1][0].length):
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def _bucket(blocks: Sequence[Block], longest: int, device: torch.device) -> Bucket:
    seen = blocks[0].prefix + blocks[0].length
    query = np.empty((len(blocks), longest), np.int64)
    key = np.empty((len(blocks), seen), np.int64)
    for line, block in enumerate(blocks):
        query[line] = block.start + np.minimum(np.arange(longest), block.length - 1)
        keys = block.keys
        key[line, : len(keys)], key[line, len(keys) :] = keys, keys[-1]
    lengths = torch.tensor([[block.length, block.prefix] for block in blocks])[:, :, None, None].to(device)
    length, prefix = lengths[:, 0], lengths[:, 1]
    # A pad among the queries sees what the last token sees: no row may see nothing.
    at = torch.arange(longest, device=device)[None, :, None].minimum(length - 1) + prefix
    distance = at - torch.arange(seen, device=device)
    return Bucket(torch.from_numpy(query).to(device), torch.from_numpy(key).to(device), distance)
