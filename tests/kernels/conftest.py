import os

import pytest
import torch

from exgrpo.kernels import dispatch
from exgrpo.kernels.torch_chunks import chunking

# Every backend that can run here passes every test that takes the fixture. Triton runs on a GPU, and in its interpreter
# where TRITON_INTERPRET=1 is in the environment; that process tests nothing else.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = [name for name in dispatch.BACKENDS if not dispatch.unavailable(name, DEVICE)]
if os.environ.get("TRITON_INTERPRET"):
    BACKENDS = ["triton"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture
def device():
    return DEVICE


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(20251002)


@pytest.fixture
def set_chunk(monkeypatch):
    """Sets the bytes of a chunk, a scratch block and a weight tile, on any device."""

    def set_bytes(chunk, block=None, tile=None):
        for kind in ("cpu", "cuda"):
            monkeypatch.setitem(chunking.CHUNK_BYTES, kind, chunk)
            monkeypatch.setitem(chunking.BLOCK_BYTES, kind, block or chunk)
        monkeypatch.setattr(chunking, "TILE_BYTES", tile or chunk)

    return set_bytes
