"""Tokens per chunk, and rows per scratch block."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import torch

CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
"""Size of one [rows, V] buffer of logits where a call gives no `memory`. On either device the products reach their
speed well below it."""

LEAST_ROWS = 512
"""Tokens of such a chunk, if there are as many, however large the vocabulary: each chunk reads the weight anew."""

GPU_MEMORY = 1 << 30
"""`memory` of the Triton backend where a call gives none."""

BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 128 << 20}
"""Size of the scratch buffer of the elementwise passes: on a CPU it stays in cache."""

TILE_BYTES = 64 << 20
"""Size of one converted tile of the weight, where the product needs another dtype than the weight has."""

SHARE = 16
"""One part of so many of a call's `memory` is the largest block, and the largest tile."""
ROW_BYTES, TOKEN_BYTES = 512, 192
"""Of the numbers that a walk keeps for each row of a chunk, and for each token of the call, in float64 and int64."""


TILE_ROWS, TILE_COLUMNS = 128, 256
"""Of the library's products on GPUs: whole tiles are what its kernels compute."""


class Cost(NamedTuple):
    """Bytes that a call allocates besides its inputs, its outputs and the gradients, those of its tokens left out."""

    fixed: int
    row: int
    """For each row of a chunk."""
    scratch: tuple[int, ...]
    """Blocks and tiles that exist at once: their sizes where the memory is large enough."""


def rows_within(memory: int, tokens: int, cost: Cost, step: int = 1, *, strict: bool = True) -> int:
    """Rows of a chunk in a call on ``tokens`` that allocates ``memory`` bytes at most; ``step`` rows make a tile.

    Raises:
        ValueError: the bytes are too few for one tile; the message names the least. Not ``strict``: one tile it is.
    """
    rest = cost.fixed + TOKEN_BYTES * tokens
    tile = rest + cost.row * min(step, max(1, tokens))

    def for_chunks(memory: int) -> int:  # grows with the memory
        return memory - sum(_within(size, memory) for size in cost.scratch)

    if for_chunks(memory) < tile and not strict:
        return step
    if for_chunks(memory) < tile:
        least = bisect_left(range(tile + sum(cost.scratch) + 1), tile, key=for_chunks)
        raise ValueError(f"memory: a call on {tokens} tokens with this head needs {least} bytes at least, got {memory}")
    return (for_chunks(memory) - rest) // cost.row


def chunk_rows(vocabulary: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of a chunk of logits over ``vocabulary`` entries where a call gives no `memory`."""
    return max(LEAST_ROWS, of_device(CHUNK_BYTES, device) // max(1, vocabulary * dtype.itemsize))


def block_rows(row_bytes: int, device: torch.device, memory: int | None = None) -> int:
    """Rows of a scratch block whose rows have so many bytes."""
    return max(1, _within(of_device(BLOCK_BYTES, device), memory) // max(1, row_bytes))


def tile_rows(row_bytes: int, memory: int | None) -> int:
    """Rows of a converted tile whose rows have so many bytes."""
    return max(1, _within(TILE_BYTES, memory) // max(1, row_bytes))


def full_waves(rows: int, width: int, processors: int) -> int:
    """The largest number of rows up to ``rows`` whose gradient of hidden states keeps a GPU's multiprocessors busy.

    They compute tiles of it, and in the last wave of tiles some may have none: in at most one place of twenty, with a
    number of rows that is not below half of what is possible. Otherwise it is the largest number of whole tiles.
    """
    most, across = max(1, rows // TILE_ROWS), -(-width // TILE_COLUMNS)
    for tall in range(most, most // 2, -1):
        tiles = tall * across
        if 20 * tiles >= 19 * processors * -(-tiles // processors):
            return tall * TILE_ROWS
    return min(rows, most * TILE_ROWS)


def spans(length: int, step: int, tile: int = 1) -> Iterator[tuple[int, int]]:
    """[0, length) cut into the fewest spans of at most ``step``, as equal as whole tiles can be."""
    count, tiles = -(-length // step), -(-length // tile)
    for i in range(count):
        yield tiles * i // count * tile, min(length, tiles * (i + 1) // count * tile)


def _within(size: int, memory: int | None) -> int:
    return size if memory is None else min(size, memory // SHARE)


def of_device(budget: dict[str, int], device: torch.device) -> int:
    """The bytes of a device."""
    return budget.get(device.type, budget["cuda"])
