"""The CUDA sources as they are shipped: what their machine code shows, and how their launchers fail without a GPU."""

import ctypes
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it brings the disassembler")

import triton

from exgrpo.kernels.chunks.softmax import PolicyRows
from exgrpo.kernels.cuda_chunks import binding
from exgrpo.kernels.cuda_chunks.binding import Build, Output, ProductArguments, RowsArguments
from exgrpo.kernels.cuda_chunks.cuda_fused import TILE_COLUMNS, TILE_ROWS

from .cuda_support import INTERPRETING, NVCC, ON_GPU, SOURCES, run

if INTERPRETING:
    pytest.skip("the process that interprets Triton kernels tests nothing else", allow_module_level=True)
if NVCC is None:
    pytest.skip("to compile CUDA sources takes nvcc", allow_module_level=True)
if "sm_100" not in run([NVCC, "--list-gpu-code"]).split():
    pytest.skip("to compile them for all architectures takes nvcc 12.8 or later", allow_module_level=True)
if not SOURCES.is_dir():
    pytest.skip(f"to compile them takes the sources in {SOURCES}", allow_module_level=True)

ARCHITECTURES = {"rows": ("90a", "100"), "product": ("90a",)}
CODES = [(name, architecture) for name, all_of_them in ARCHITECTURES.items() for architecture in all_of_them]
FLAGS = ["-std=c++17", "-O3", "-DNDEBUG", "-Xcompiler=-fPIC,-Wall,-Wextra"]
REGISTERS = {"rows": 65536 // (3 * 256), "product": 65536 // 384}
"""That a thread may have at its start, so that as many threads are resident as were planned."""


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Folder with the object of each source and the library of all."""
    folder = tmp_path_factory.mktemp("cuda")

    def compile_source(name):
        codes = [f"-gencode=arch=compute_{code},code=sm_{code}" for code in ARCHITECTURES[name]]
        printed = run([NVCC, *FLAGS, *codes, "-c", SOURCES / f"{name}.cu", "-o", folder / f"{name}.o"])
        assert not printed  # a product that is serialised or keeps its registers is only a warning

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_source, ARCHITECTURES))
    objects = [folder / f"{name}.o" for name in ARCHITECTURES]
    run([NVCC, "-shared", "-cudart", "static", *objects, "-o", folder / "_cuda.so"])
    return folder


@pytest.fixture(scope="session")
def disassembled(built):
    """Machine code and use of resources by source and architecture."""
    dump = triton.knobs.nvidia.cuobjdump.path

    def of(code):
        name, architecture = code
        command = [dump, "-arch", f"sm_{architecture}"]
        return run([*command, "-sass", built / f"{name}.o"]), run([*command, "-res-usage", built / f"{name}.o"])

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CODES, pool.map(of, CODES), strict=True))


@pytest.mark.parametrize("code", CODES, ids="-sm_".join)
def test_everything_stays_in_registers(code, disassembled):
    machine_code, usage = disassembled[code]
    kernels = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert len(kernels) == (5 if code[0] == "rows" else 2)
    for registers, stack, shared, local in kernels:
        limit = REGISTERS[code[0]]
        # The product's warpgroups trade theirs: what they trade for is right only if they begin with all of them.
        assert int(registers) <= limit if code[0] == "rows" else int(registers) == limit - limit % 8
        assert (int(stack), int(local)) == (0, 0)
        assert int(shared) <= 1024  # the system's
    assert not re.search(r"\b(?:LDL|STL)\b", machine_code)
    assert not re.search(r"\s(?:ATOM[GS]?|REDG?)\.", machine_code)  # they would add in any order


@pytest.mark.parametrize("architecture", ARCHITECTURES["rows"])
def test_rows_are_read_and_written_sixteen_bytes_at_a_time(architecture, disassembled):
    machine_code, _ = disassembled["rows", architecture]
    assert re.search(r"\bLDGSTS\.E\.BYPASS\.128\b", machine_code)
    assert len(re.findall(r"\bSTG\.E\.128\b", machine_code)) >= 4  # each kernel that writes has one
    assert re.search(r"\bUCGABAR_ARV\b", machine_code)  # between the blocks of a cluster


def test_the_product_is_on_the_matrix_units(disassembled):
    """Operands and result by tensor copies, eight products a step that nothing waits for one by one."""
    machine_code, _ = disassembled["product", "90a"]
    kernels = machine_code.split("Function : ")[1:]
    for kernel in kernels:
        products = list(re.finditer(r"\bHGMMA\.64x192x16\.F32\.BF16\b", kernel))
        assert len(products) == 8
        assert len(re.findall(r"\bWARPGROUP\.DEPBAR", kernel)) == 2
        assert re.search(r"\bUTMALDG\.2D\b", kernel)
        assert re.search(r"\bUSETMAXREG\b", kernel)
        assert not re.search(r"\bHMMA\b", kernel)
        # Where barriers were waited for with a cluster's scope, these took half of the time.
        assert not re.search(r"\b(?:MEMBAR|ERRBAR|CCTL)\b", kernel[products[0].start() : products[-1].end()])
    assert sorted(bool(re.search(r"\bUTMASTG\.2D\b", kernel)) for kernel in kernels) == [False, True]


def test_an_exponential_takes_few_instructions(disassembled):
    """Of the whole kernel, all in all: its epilogue is written out for the 192 numbers of a thread."""
    machine_code, _ = disassembled["product", "90a"]
    counts = [
        len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s", kernel, re.M)) for kernel in machine_code.split("Function : ")[1:]
    ]
    assert 192 * 6 < min(counts) <= max(counts) < 192 * 20


def test_shared_memory_is_within_limits(tmp_path):
    """Of the product; that of the rows is planned, see test_cuda_passes."""
    source = tmp_path / "limits.cpp"
    source.write_text('#include "product.h"\nstatic_assert(exgrpo::PRODUCT_SHARED <= 227 << 10);\n', encoding="utf-8")
    run([NVCC, "-std=c++17", f"-I{SOURCES}", "-c", source, "-o", tmp_path / "limits.o"])


@pytest.fixture
def shipped(built):
    return binding.declared(ctypes.CDLL(str(built / "_cuda.so")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_failing_call_is_named(shipped):
    rows = RowsArguments(rows=2, vocabulary=100, output=Output.NOTHING)
    with pytest.raises(RuntimeError, match=r"cuda backend: cudaFuncSetAttribute\(MaxDynamicSharedMemorySize\): \w+"):
        binding.check(shipped.exgrpo_rows(rows, None))
    product = ProductArguments(rows=2, vocabulary=100, width=64)
    with pytest.raises(RuntimeError, match=r"cuda backend: cudaGetDriverEntryPointByVersion\(\w+\): \w+"):
        binding.check(shipped.exgrpo_product(product, None))


def test_arguments_that_cannot_be_launched(shipped):
    with pytest.raises(RuntimeError, match="no cluster can hold a row of so large a vocabulary"):
        binding.check(shipped.exgrpo_rows(RowsArguments(rows=2, vocabulary=2_000_000), None))
    with pytest.raises(RuntimeError, match="more rows than a grid has blocks"):
        binding.check(shipped.exgrpo_rows(RowsArguments(rows=1 << 31, vocabulary=100), None))
    with pytest.raises(RuntimeError, match="unknown output"):
        binding.check(shipped.exgrpo_rows(RowsArguments(rows=2, vocabulary=100, output=7), None))
    with pytest.raises(RuntimeError, match="too many tiles; use smaller chunks"):
        binding.check(shipped.exgrpo_product(ProductArguments(rows=1 << 30, vocabulary=1 << 20, width=64), None))


def test_nothing_to_do_is_no_error(shipped):
    for rows, vocabulary in ((0, 100), (5, 0)):
        assert shipped.exgrpo_rows(RowsArguments(rows=rows, vocabulary=vocabulary), None) is None
        assert shipped.exgrpo_product(ProductArguments(rows=rows, vocabulary=vocabulary, width=64), None) is None


def test_python_and_cuda_agree_about_the_arguments(tmp_path):
    """Size and place of every field of the structures, and what numbers stand for."""
    names = {"build.h": Build, "rows.h": RowsArguments, "product.h": ProductArguments}
    checks = [f'#include "{header}"' for header in names] + ["#include <cstddef>"]
    for structure in names.values():
        name = structure.__name__
        checks.append(f"static_assert(sizeof(exgrpo::{name}) == {ctypes.sizeof(structure)});")
        for field, *_ in structure._fields_:
            place = getattr(structure, field).offset
            checks.append(f"static_assert(offsetof(exgrpo::{name}, {field}) == {place});")
    checks.append(f"static_assert(exgrpo::TILE_ROWS == {TILE_ROWS} && exgrpo::TILE_COLUMNS == {TILE_COLUMNS});")
    checks.append(f"static_assert(exgrpo::RESULTS == {len(PolicyRows._fields)});")
    checks += [f"static_assert(exgrpo::{output.name} == {output.value});" for output in Output]
    source = tmp_path / "places.cpp"
    source.write_text("\n".join(checks), encoding="utf-8")
    run([NVCC, "-std=c++17", f"-I{SOURCES}", "-c", source, "-o", tmp_path / "places.o"])


def test_a_library_that_is_not_there_or_broken(monkeypatch, tmp_path):
    for path in (tmp_path / "missing.so", tmp_path / "broken.so"):
        (tmp_path / "broken.so").write_bytes(b"no library")
        monkeypatch.setattr(binding, "PATH", path)
        binding.load.cache_clear()
        with pytest.raises(RuntimeError, match=rf"{path.name}.*EXGRPO_CUDA=force"):
            binding.load()
    binding.load.cache_clear()


REPORT = """
import ctypes, sys
from exgrpo.kernels.cuda_chunks import binding
build = binding.declared(ctypes.CDLL(sys.argv[1])).exgrpo_build()
print(build.runtime, build.driver, build.architectures.decode())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines with another driver")
def test_what_it_is_built_with_and_the_drivers_version(built, tmp_path):
    """Beside no driver, and beside one that can do nothing but tell its version; nvcc tells that of the runtime."""
    found = re.search(r"release (\d+)\.(\d+)", run([NVCC, "--version"]))
    runtime = 1000 * int(found[1]) + 10 * int(found[2])
    source = tmp_path / "driver.c"
    source.write_text("int cuDriverGetVersion(int* version) { *version = 12040; return 0; }\n", encoding="utf-8")
    run(["gcc", "-shared", "-fPIC", source, "-o", tmp_path / "libcuda.so.1"])
    for folder, driver in ((tmp_path / "none", 0), (tmp_path, 12040)):
        command = [sys.executable, "-c", REPORT, str(built / "_cuda.so")]
        told = subprocess.run(
            command, env={**os.environ, "LD_LIBRARY_PATH": str(folder)}, capture_output=True, text=True, check=True
        )
        assert told.stdout.split() == [str(runtime), str(driver), "900,1000"]


@pytest.mark.parametrize("runtime", [12000, 12080, 13000])
@pytest.mark.parametrize("driver", [0, 11080, 12000, 12040, 12080, 13000, 13010, 14000])
def test_a_driver_runs_its_own_major_release_and_earlier_ones(runtime, driver):
    """NVIDIA's rule; machine code for a device stands in the library or not."""
    reason = binding.unfit(Build(runtime, driver, b"900,1000"), (9, 0))
    assert bool(reason) == (driver < runtime - runtime % 1000)
    if reason:
        assert f"built with CUDA {runtime // 1000}.{runtime % 1000 // 10} and the driver supports" in reason
        assert f" CUDA {driver // 1000}.{driver % 1000 // 10} at most: " in reason
        assert "update the driver, or install exgrpo anew with nvcc of" in reason


def test_devices_that_it_is_not_compiled_for():
    whole, part = Build(12080, 13000, b"900,1000"), Build(12040, 13000, b"900")
    assert not any(binding.unfit(whole, device) for device in ((9, 0), (10, 0), (10, 3)))
    assert not binding.unfit(part, (9, 0))
    assert "compute capability 9.0; the device has 10.3; install exgrpo anew with" in binding.unfit(part, (10, 3))
    assert binding.unfit(whole, (12, 0)) == "it is compiled for compute capability 9.0, 10.0, 10.3; the device has 12.0"


@pytest.fixture
def on_hopper(monkeypatch, tmp_path):
    """A machine that seems to have one, and the path of its library."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(binding, "PATH", tmp_path / "_cuda.so")
    binding.load.cache_clear()
    yield binding.PATH
    binding.load.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a driver")
def test_the_driver_is_asked_before_anything_is_launched(on_hopper, built):
    assert "_cuda.so" in binding.unavailable(torch.device("cuda"))
    on_hopper.write_bytes(b"no library")
    assert "build it anew with EXGRPO_CUDA=force" in binding.unavailable(torch.device("cuda"))
    on_hopper.unlink()
    on_hopper.symlink_to(built / "_cuda.so")
    assert "the driver supports CUDA 0.0 at most" in binding.unavailable(torch.device("cuda"))


def test_without_a_gpu_the_reason_is_given():
    assert "needs a GPU" in binding.unavailable(torch.device("cpu"))


SANITIZER = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"


@pytest.mark.gpu
@pytest.mark.skipif(not (ON_GPU and SANITIZER.exists()), reason="needs a GPU, _cuda.so and compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("test", ["passes.py::test_a_cap", "fused.py::test_tiles_in_turn"])
def test_sanitized(tool, test):
    options = [f"--tool={tool}", "--error-exitcode=3", "--target-processes=all"]
    tests = [sys.executable, "-m", "pytest", "-q", "-k", "gpu", f"tests/kernels/test_cuda_{test}"]
    done = subprocess.run([str(SANITIZER), *options, *tests], capture_output=True, text=True, cwd=SOURCES.parents[1])
    assert done.returncode == 0, done.stdout[-4000:]
