"""The CUDA sources compiled for tests: for an emulated machine, and as they are shipped."""

import ctypes
import os
import shutil
import subprocess
from ctypes import POINTER, byref, c_bool, c_char_p, c_int
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from exgrpo.kernels import dispatch, extension
from exgrpo.kernels.cuda_chunks import cuda_fused
from exgrpo.kernels.cuda_chunks.cuda_fused import ProductArguments
from tests.programs import ran

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "csrc" / "cuda"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin")
COMPILER = shutil.which("g++")
ON_GPU = not extension.cuda_unavailable(torch.device("cuda")) if torch.cuda.is_available() else False


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


def emulate_product(arguments, *, clusters=1, backwards=False, eager=False):
    """Run the product on some arguments by so many clusters."""
    function = emulated("cuda_product_emulation").emulated_product
    function.restype, function.argtypes = c_char_p, [POINTER(ProductArguments), c_int, c_bool, c_bool]
    cuda_fused.check(function(byref(arguments), clusters, backwards, eager))


def emulate_backend(monkeypatch):
    """Let the CUDA backend run without a GPU: its own kernels emulated, Triton's in their interpreter."""
    monkeypatch.setitem(dispatch.BACKENDS, "cuda", "exgrpo.kernels.cuda_chunks")
    monkeypatch.setattr(cuda_fused, "launch", lambda arguments, device: emulate_product(arguments))
    monkeypatch.setattr(extension, "cuda_unavailable", lambda device: "")


def run(command):
    """Output of a command that must succeed."""
    done = ran(*command)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr
