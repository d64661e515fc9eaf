import os
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from exgrpo.kernels import dispatch
from exgrpo.kernels.chunks import chunking
from exgrpo.kernels.torch_chunks.torch_passes import TorchPasses

from .support import INTERPRETING

# Every backend that can run here passes every test that takes the fixture. Triton runs on a GPU, and in its interpreter
# where TRITON_INTERPRET=1 is in the environment; that process tests nothing else.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def backends_of(device):
    """Return the backends tested on a device."""
    if INTERPRETING:
        return ["triton"]
    return [name for name in dispatch.BACKENDS if not dispatch.unavailable(name, torch.device(device))]


BACKENDS = backends_of(DEVICE)
if INTERPRETING:
    from .interpreting import correct_bfloat16_dot, patch_language_once

    correct_bfloat16_dot()
    patch_language_once()
    os.environ["EXGRPO_SELF_TEST"] = "0"  # a second for each kind of call, and these tests say more
    collect_ignore_glob = ["test_cpu_*", "test_cuda_*", "test_*compile*", "test_*_self_test.py"]
INTERPRETED = ("test_sixteen_bits", "test_combinations", "test_vocab_group")  # besides tests of a backend
if "triton" in BACKENDS:
    from exgrpo.kernels.triton_chunks import triton_passes
    from exgrpo.kernels.triton_chunks.triton_passes import TritonPasses


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leaves the process that interprets nothing else to do; it is slow.

    Of a test with several parametrisations every value is tried, and further combinations of them are ``long``.
    """
    if not INTERPRETING:
        return
    here, others, tried = Path(__file__).parent, [], defaultdict(set)
    for item in items:
        if here not in item.path.parents:
            continue
        if "backend" not in item.fixturenames and not item.path.name.startswith(INTERPRETED):
            others.append(item)
        elif hasattr(item, "callspec"):
            values = {(name, repr(value)) for name, value in item.callspec.params.items()}
            known = tried[item.path, item.originalname]
            if values <= known:
                item.add_marker(pytest.mark.long)
            elif not item.get_closest_marker("long"):
                known |= values
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture
def device():
    return DEVICE


@pytest.fixture
def chosen(backend, device, monkeypatch):
    """Select the backend for functions without a head, which have no argument for it."""
    monkeypatch.setenv("EXGRPO_BACKEND", backend)
    with torch.device(device):
        yield


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(20251002)


if DEVICE.type == "cuda":

    @pytest.fixture(autouse=True)
    def usable():
        """Ends a process whose device computes nothing more, as after an assertion there: all its tests would fail."""
        yield
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            if "PYTEST_XDIST_WORKER" in os.environ:
                os._exit(1)  # pytest-xdist names the test, and begins another process
            pytest.exit(str(error))


@pytest.fixture
def set_threads():
    """Sets the number of threads of a process, which is as before afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def set_chunk(monkeypatch):
    """Sets the bytes of a chunk, a scratch block and a weight tile, on any device."""
    return partial(set_chunk_bytes, monkeypatch)


@pytest.fixture
def set_plan(monkeypatch):
    """Sets fields of the launch plan of every width, dtype and machine."""
    return partial(set_plan_fields, monkeypatch)


def set_plan_fields(monkeypatch, **fields):
    from exgrpo.kernels.triton_chunks import launch

    chosen = replace(launch.planned(launch.architecture(DEVICE), torch.float32, 64), **fields)
    monkeypatch.setattr(triton_passes, "plan", lambda *_: chosen)


def set_chunk_bytes(monkeypatch, chunk, block=None, tile=None):
    for kind in ("cpu", "cuda"):
        monkeypatch.setitem(chunking.CHUNK_BYTES, kind, chunk)
        monkeypatch.setitem(chunking.BLOCK_BYTES, kind, block or chunk)
    monkeypatch.setattr(chunking, "TILE_BYTES", tile or chunk)
    monkeypatch.setattr(chunking, "LEAST_ROWS", 1)
    monkeypatch.setattr(TorchPasses, "slice_columns", lambda passes: slice_columns_of(passes) * passes.products.mixed)
    if "triton" in BACKENDS:  # its chunks are whole tiles, and of a size that a launch table says
        monkeypatch.setattr(TritonPasses, "chunk_rows", lambda passes, **_: chunk_rows_of(passes.head))
        monkeypatch.setattr(TritonPasses, "slice_columns", slice_columns_of)
        monkeypatch.setattr(TritonPasses, "tile", 1)


def slice_columns_of(passes):
    head = passes.head
    row = head.active * head.dtype.itemsize
    return min(head.shard.size, chunking.of_device(chunking.CHUNK_BYTES, head.head.weight.device) // row)


def chunk_rows_of(head):
    return head.at_once or chunking.chunk_rows(head.shard.largest, head.dtype, head.head.weight.device)
