import pytest
import torch

from exgrpo.kernels.torch_chunks import chunking

# A further backend is one more entry; it passes every test that takes the fixture.
BACKENDS = ["torch"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
