"""The CUDA sources as they are shipped: what their machine code shows, and how their launchers fail without a GPU."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it brings the disassembler")

import triton

from exgrpo.kernels import extension
from exgrpo.kernels.cuda_chunks.cuda_fused import TILE_COLUMNS, TILE_ROWS, ProductArguments, check
from tests.programs import printed

from .cuda_support import NVCC, ON_GPU, SOURCES, run

FLAGS = ["-std=c++17", "-O3", "-DNDEBUG", "-Xcompiler=-fPIC,-Wall,-Wextra", "-gencode=arch=compute_90a,code=sm_90a"]
if NVCC is None or subprocess.call([NVCC, "--dryrun", FLAGS[-1], "-x=cu", "-c", os.devnull], stderr=subprocess.DEVNULL):
    pytest.skip("to compile CUDA sources takes an nvcc that knows Hopper", allow_module_level=True)
if not SOURCES.is_dir():
    pytest.skip(f"to compile them takes the sources in {SOURCES}", allow_module_level=True)

REGISTERS = 65536 // 384 // 8 * 8
"""Of a thread at its start: the warpgroups trade theirs, and what they trade for is right only with all of them."""


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Folder with the object and the library of it."""
    folder = tmp_path_factory.mktemp("cuda")
    printed = run([NVCC, *FLAGS, "-c", SOURCES / "product.cu", "-o", folder / "product.o"])
    assert not printed  # a product that is serialised or keeps its registers is only a warning
    run([NVCC, "-shared", "-cudart", "static", folder / "product.o", "-o", folder / "_cuda.so"])
    return folder


@pytest.fixture(scope="session")
def disassembled(built):
    """Machine code of each kernel."""
    return run([triton.knobs.nvidia.cuobjdump.path, "-sass", built / "product.o"]).split("Function : ")[1:]


def test_everything_stays_in_registers(built, disassembled):
    usage = run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", built / "product.o"])
    kernels = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert len(kernels) == len(disassembled) == 3
    for registers, stack, shared, local in kernels:
        assert (int(registers), int(stack), int(local)) == (REGISTERS, 0, 0)
        assert int(shared) <= 1024  # the system's
    for kernel in disassembled:
        assert not re.search(r"\b(?:LDL|STL)\b", kernel)
        assert not re.search(r"\s(?:ATOM[GS]?|REDG?)\.", kernel)  # they would add in any order


def test_the_product_is_on_the_matrix_units(disassembled):
    """Operands and result by tensor copies, eight products a step that nothing waits for one by one."""
    for kernel in disassembled:
        products = list(re.finditer(r"\bHGMMA\.64x192x16\.F32\.BF16\b", kernel))
        assert len(products) == 8
        assert len(re.findall(r"\bWARPGROUP\.DEPBAR", kernel)) == 2
        assert re.search(r"\bUTMALDG\.2D\b", kernel)
        assert re.search(r"\bUSETMAXREG\b", kernel)
        assert not re.search(r"\bHMMA\b", kernel)
        # Where barriers were waited for with a cluster's scope, these took half of the time.
        assert not re.search(r"\b(?:MEMBAR|ERRBAR|CCTL)\b", kernel[products[0].start() : products[-1].end()])
    assert sorted(bool(re.search(r"\bUTMASTG\.2D\b", kernel)) for kernel in disassembled) == [False, True, True]


@pytest.fixture
def library(monkeypatch, tmp_path):
    """Path of the library, where there is none yet."""
    monkeypatch.setattr(extension, "CUDA_FILE", tmp_path / "_cuda.so")
    forget()
    yield extension.CUDA_FILE
    forget()


def forget():
    extension.cuda_library.cache_clear()
    extension.cuda_missing.cache_clear()


def test_calls_that_fail_are_named(library, built):
    library.symlink_to(built / "_cuda.so")

    def call(rows, vocabulary):
        arguments = ProductArguments(rows=rows, vocabulary=vocabulary, width=64)
        check(extension.cuda_library().exgrpo_product(ctypes.byref(arguments), None))

    for rows, vocabulary in ((0, 100), (5, 0)):  # nothing to do is no error
        call(rows, vocabulary)
    with pytest.raises(RuntimeError, match="too many tiles; use smaller chunks"):
        call(1 << 30, 1 << 20)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"cuda backend: cudaGetDriverEntryPointByVersion\(\w+\): \w+"):
            call(2, 100)


def test_python_and_cuda_agree_about_the_arguments(tmp_path):
    """Size and place of every field of the structures, and the tiles; shared memory is within limits."""
    names = {"build.h": ("Build", extension.CudaBuild), "product.h": ("ProductArguments", ProductArguments)}
    checks = [f'#include "{header}"' for header in names] + ["#include <cstddef>"]
    for name, structure in names.values():
        checks.append(f"static_assert(sizeof(exgrpo::{name}) == {ctypes.sizeof(structure)});")
        for field, *_ in structure._fields_:
            place = getattr(structure, field).offset
            checks.append(f"static_assert(offsetof(exgrpo::{name}, {field}) == {place});")
    checks.append("static_assert(exgrpo::PRODUCT_SHARED <= 227 << 10);")
    checks.append(f"static_assert(exgrpo::TILE_ROWS == {TILE_ROWS} && exgrpo::TILE_COLUMNS == {TILE_COLUMNS});")
    source = tmp_path / "places.cpp"
    source.write_text("\n".join(checks), encoding="utf-8")
    run([NVCC, "-std=c++17", f"-I{SOURCES}", "-c", source, "-o", tmp_path / "places.o"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a driver")
def test_the_driver_is_asked_before_anything_is_launched(library, built, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = torch.device("cuda")
    assert "_cuda.so" in extension.cuda_unavailable(gpu)
    forget()
    library.write_bytes(b"no library")
    assert "build it anew with EXGRPO_CUDA=force" in extension.cuda_unavailable(gpu) == extension.cuda_state()
    forget()
    library.unlink()
    library.symlink_to(built / "_cuda.so")
    assert extension.cuda_unavailable(gpu) == "there is no NVIDIA driver"
    assert re.fullmatch(r"_cuda.so, sm_90a by CUDA (\d+)\.\d, for drivers of CUDA \1 or newer", extension.cuda_state())


SANITIZER = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"


@pytest.mark.gpu
@pytest.mark.skipif(not (ON_GPU and SANITIZER.exists()), reason="needs a GPU, _cuda.so and compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitized(tool):
    options = [f"--tool={tool}", "--error-exitcode=3", "--target-processes=all"]
    tests = [sys.executable, "-m", "pytest", "-q", "-k", "gpu", "tests/kernels/test_cuda_fused.py::test_tiles_in_turn"]
    printed(SANITIZER, *options, *tests, cwd=SOURCES.parents[1])
