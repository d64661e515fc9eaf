"""Rows with a gradient are moved together: which ones move, and that the right ones arrive."""

import pytest
import torch

from exgrpo.kernels.chunks.head import packing
from exgrpo.kernels.torch_chunks.torch_passes import compact


@pytest.mark.parametrize("kept", [[0], [3, 4], [0, 1, 2], [1, 2, 5, 6], [0, 2, 4, 6, 8], list(range(9))], ids=str)
def test_the_fewest_rows_move(kept, set_chunk, device):
    set_chunk(1 << 20, block=2 * 5 * 4)
    matrix = torch.randn(9, 5, device=device)
    before, order = matrix.clone(), packing(torch.tensor(kept, device=device))
    assert sorted(order.tolist()) == kept
    moved = [place for place, row in enumerate(order.tolist()) if place != row]
    assert len(moved) == sum(row >= len(kept) for row in kept)
    compacted = compact(matrix, order)
    assert compacted.data_ptr() == matrix.data_ptr()
    assert torch.equal(compacted, before[order])
