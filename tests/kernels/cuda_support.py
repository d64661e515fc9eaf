"""The CUDA sources compiled for tests: for an emulated machine, and as they are shipped."""

import ctypes
import os
import shutil
import subprocess
from ctypes import POINTER, byref, c_bool, c_char_p, c_int, c_int64
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from exgrpo.kernels import dispatch
from exgrpo.kernels.cuda_chunks import binding
from exgrpo.kernels.cuda_chunks.binding import ProductArguments, RowsArguments, RowsPlan

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "csrc" / "cuda"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin")
COMPILER = shutil.which("g++")
INTERPRETING = bool(os.environ.get("TRITON_INTERPRET"))
ON_GPU = not binding.unavailable(torch.device("cuda")) if torch.cuda.is_available() else False


@cache
def emulated(name):
    """A driver of this folder, compiled for the host with the emulated machine in the place of the CUDA one."""
    if COMPILER is None:
        pytest.skip("the emulation needs g++")
    if not SOURCES.is_dir():
        pytest.skip(f"the emulation needs the sources in {SOURCES}")
    folder = Path(mkdtemp(prefix="exgrpo-emulation-"))
    path = folder / f"{name}.so"
    # Jumps between the fibers' stacks look like a fault to fortified ones.
    flags = "-std=c++17 -O2 -U_FORTIFY_SOURCE -Wall -Wextra -Werror -Wno-unknown-pragmas -shared -fPIC"
    command = [COMPILER, *flags.split(), f"-I{SOURCES}", str(HERE / f"{name}.cpp"), "-o", str(path)]
    try:
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(path))
    finally:
        shutil.rmtree(folder)


def emulate_rows(call, *, cluster, threads, columns, backwards=False):
    """A call of the row kernel by clusters of this size, each block with so many threads and columns."""
    function = emulated("cuda_emulation").emulated_rows
    function.restype, function.argtypes = c_char_p, [POINTER(RowsArguments), c_int, c_int, c_int, c_bool]
    binding.check(function(byref(call.arguments), cluster, threads, columns, backwards))


def emulate_product(call, *, clusters=1, backwards=False, eager=False):
    """A call of the product by so many clusters."""
    function = emulated("cuda_product_emulation").emulated_product
    function.restype, function.argtypes = c_char_p, [POINTER(ProductArguments), c_int, c_bool, c_bool]
    binding.check(function(byref(call.arguments), clusters, backwards, eager))


def emulated_plan(vocabulary):
    """How a row would be shared out on a GPU."""
    function = emulated("cuda_emulation").exgrpo_rows_plan
    function.restype, function.argtypes = RowsPlan, [c_int64]
    return function(vocabulary)


def emulate_backend(monkeypatch):
    """Let the CUDA backend run without a GPU: its own kernels emulated, Triton's in their interpreter."""
    from exgrpo.kernels.cuda_chunks import cuda_fused, cuda_passes

    def launch(call, device):
        if call.function == "exgrpo_rows":
            emulate_rows(call, cluster=2, threads=64, columns=-(-call.arguments.vocabulary // 16) * 8)
        else:
            emulate_product(call)

    monkeypatch.setitem(dispatch.BACKENDS, "cuda", "exgrpo.kernels.cuda_chunks")
    monkeypatch.setattr(binding.Call, "launch", launch)
    monkeypatch.setattr(binding, "unavailable", lambda device: "")
    monkeypatch.setattr(cuda_passes, "_fits", lambda rows: rows > 0 and bool(emulated_plan(rows).cluster))
    monkeypatch.setattr(cuda_fused, "_capable", lambda device: True)


def run(command):
    """Output of a command that must succeed."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr
