"""How many tokens are worked on at once."""

from collections.abc import Iterator

import torch

CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
"""Size of one [rows, V] buffer of logits. On either device the products reach their speed well below it."""

LEAST_ROWS = 512
"""Tokens of a chunk, if there are as many, however large the vocabulary: the weight is read anew for each chunk."""

GPU_ROWS = 4096
"""Tokens of a chunk of the Triton backend where its launch table says nothing else: what an estimate can know."""

BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 128 << 20}
"""Size of the scratch buffer of the elementwise passes: on a CPU it stays in cache."""

TILE_BYTES = 64 << 20
"""Size of one converted tile of the weight, where the product needs another dtype than the weight has."""


def chunk_rows(vocabulary: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of a chunk of logits over ``vocabulary`` entries."""
    return max(LEAST_ROWS, _rows(CHUNK_BYTES, vocabulary, dtype, device))


def block_rows(vocabulary: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of a scratch block over ``vocabulary`` entries."""
    return _rows(BLOCK_BYTES, vocabulary, dtype, device)


def spans(length: int, step: int) -> Iterator[tuple[int, int]]:
    """[0, length) cut into the fewest spans of at most ``step``, as equal as can be."""
    count = -(-length // step)
    for i in range(count):
        yield length * i // count, length * (i + 1) // count


def _rows(budget: dict[str, int], vocabulary: int, dtype: torch.dtype, device: torch.device) -> int:
    size = budget.get(device.type, budget["cuda"])
    return max(1, size // (max(1, vocabulary) * dtype.itemsize))
