"""The compiled files: the operators `torch.ops.exgrpo_C` for CPUs and the library for Hopper GPUs.

Why one is missing stands in `build.json`, which setup.py writes.
"""

import ctypes
import json
import os
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
"""The folder from which `exgrpo` is imported."""
AGAIN = "install exgrpo again by pip install --no-build-isolation"
FILE = Path(__file__).with_name("_C.abi3.so")
"""The operators for CPUs."""
CUDA_FILE = Path(__file__).with_name("cuda_chunks") / "_cuda.so"
"""The library for GPUs of CUDA_CAPABILITY: the matrix units of others are programmed in other ways."""
CUDA_CAPABILITY = (9, 0)
OLDEST_DRIVER = 12
"""Major release of CUDA whose driver is the first with the functions and the architecture of the library."""


def why_missing(file: Path, tools: str, root: Path = ROOT) -> str:
    """Return why a compiled file is not there, and what to do.

    Args:
        file: where it would be, below ``root``.
        tools: what it is built with.
        root: the folder that holds the package.
    """
    inside = os.path.relpath(file, root)
    # A program that is started in the source folder imports the package from there, whatever is installed.
    for distribution in distributions(name="exgrpo"):
        if Path(str(distribution.locate_file(inside))).exists():
            return (
                f"exgrpo is imported from {root}, which has no {file.name}, and the installed package in "
                f"{distribution.locate_file('')} has it; start Python in another folder, or use "
                "pip install --no-build-isolation --editable ."
            )
    record = root / "exgrpo" / "kernels" / "build.json"
    reason = json.loads(record.read_text(encoding="utf-8")).get(file.name) if record.exists() else ""
    if reason:
        return f"{file.name} was not built when exgrpo was installed: {reason}, then {AGAIN}"
    return f"{file.name} is not in {file.parent}; {AGAIN}, with {tools} present"


def load(file: Path) -> str:
    """Load the operators; return why that failed, "" if it did not."""
    if not file.exists():
        return why_missing(file, "torch and a C++ compiler")
    try:
        torch.ops.load_library(str(file))
    except OSError as error:
        return f"{file.name} cannot be loaded, install again: {error.__cause__ or error}"
    return ""


MISSING = load(FILE)
"""Why there are no compiled operators; empty where they are there."""

OPERATORS = torch.ops.exgrpo_C


class CudaBuild(ctypes.Structure):
    """CUDA of the library's build, and the newest one that the driver supports: csrc/cuda/build.h."""

    _fields_ = (("runtime", ctypes.c_int32), ("driver", ctypes.c_int32))


@cache
def cuda_library() -> ctypes.CDLL:
    """Load the library for GPUs, which needs neither a driver nor CUDA for that.

    Raises:
        RuntimeError: it is not there or cannot be loaded.
    """
    if not CUDA_FILE.exists():
        raise RuntimeError(why_missing(CUDA_FILE, "nvcc"))
    try:
        library = ctypes.CDLL(str(CUDA_FILE))
        library.exgrpo_build.restype, library.exgrpo_build.argtypes = CudaBuild, ()
        library.exgrpo_product.restype = ctypes.c_char_p
        library.exgrpo_product.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            f"{CUDA_FILE}: {error}; build it anew with EXGRPO_CUDA=force, or use another backend"
        ) from error
    return library


@cache
def cuda_missing() -> str:
    """Return why there is no library for GPUs, "" if it is loaded."""
    try:
        cuda_library()
    except RuntimeError as error:
        return str(error)
    return ""


def cuda_state() -> str:
    """Return what the library for GPUs needs, or why there is none."""
    if reason := cuda_missing():
        return reason
    runtime = cuda_library().exgrpo_build().runtime
    return f"{CUDA_FILE.name}, sm_90a by CUDA {_version(runtime)}, for drivers of CUDA {_needed(runtime)} or newer"


def cuda_unavailable(device: torch.device) -> str:
    """Return why the library cannot run on a device, "" if it can."""
    if device.type != "cuda":
        return f"it needs a GPU; the tensors are on {device.type}"
    if torch.version.hip:
        return "it needs an NVIDIA GPU"
    if reason := cuda_missing():
        return reason
    return cuda_unfit(cuda_library().exgrpo_build(), torch.cuda.get_device_capability(device))


def cuda_unfit(build: CudaBuild, capability: tuple[int, int]) -> str:
    """Return why a library cannot run with its driver on a device of this compute capability, "" if it can.

    A runtime works with every driver of its own major release or a later one. What an older driver of the same release
    lacks is not needed: it cannot compile PTX of later versions, but the library has only machine code; it has not all
    functions, but those that are called here are of CUDA 12.0, the first that knows these devices' architectures.
    """
    if not build.driver:
        return "there is no NVIDIA driver"
    if build.driver // 1000 < (needed := _needed(build.runtime)):
        older = f", or install exgrpo anew with nvcc of CUDA {OLDEST_DRIVER} and EXGRPO_CUDA=force"
        return (
            f"{CUDA_FILE.name} needs a driver of CUDA {needed} or newer, and this one supports CUDA "
            f"{_version(build.driver)} at most: update it{older if build.driver // 1000 >= OLDEST_DRIVER else ''}"
        )
    if capability != CUDA_CAPABILITY:
        wanted, found = ("{}.{}".format(*one) for one in (CUDA_CAPABILITY, capability))
        return f"it is written for compute capability {wanted} (Hopper); the device has {found}"
    return ""


def _needed(runtime: int) -> int:
    return max(runtime // 1000, OLDEST_DRIVER)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
