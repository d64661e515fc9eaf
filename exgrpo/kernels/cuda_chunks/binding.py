"""The compiled kernels: _cuda.so, loaded when it is first needed, and its functions with their signatures."""

import ctypes
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from exgrpo.kernels.extension import why_missing

PATH = Path(__file__).with_name("_cuda.so")
"""Built by setup.py where nvcc is."""
CAPABILITY = (9, 0)
"""Compute capability that csrc/cuda/product.cu is for: the matrix units of other GPUs are programmed in other ways."""


class ProductArguments(ctypes.Structure):
    """Structure of csrc/cuda/product.h, field by field."""

    _fields_ = (
        ("rows", c_int64),
        ("vocabulary", c_int64),
        ("width", c_int64),
        ("hidden", c_void_p),
        ("hidden_stride", c_int64),
        ("weight", c_void_p),
        ("weight_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("bias", c_void_p),
        ("target", c_void_p),
        ("anchor", c_void_p),
        ("temperature", c_void_p),
        ("rests", c_void_p),
        ("moments", c_void_p),
    )


class Build(ctypes.Structure):
    """CUDA of the library's build, and the newest one that the driver supports: csrc/cuda/build.h."""

    _fields_ = (("runtime", c_int32), ("driver", c_int32))


def unavailable(device: torch.device) -> str:
    """Return why the kernels cannot run on a device, "" if they can."""
    if device.type != "cuda":
        return f"it needs a GPU; the tensors are on {device.type}"
    if torch.version.hip:
        return "it needs an NVIDIA GPU"
    if not PATH.exists():
        return why_missing(PATH, "nvcc")
    try:
        build = load().exgrpo_build()
    except RuntimeError as error:
        return str(error)
    return unfit(build, torch.cuda.get_device_capability(device))


def unfit(build: Build, capability: tuple[int, int]) -> str:
    """Return why a library cannot run with its driver on a device of this compute capability, "" if it can.

    A runtime works with every driver of its own major release or a later one. What an older driver of the same release
    lacks is not needed: it cannot compile PTX of later versions, but the library has only machine code; it has not all
    functions, but those that are called here are of CUDA 12.0, the first that knows these devices' architectures.
    """
    if build.driver // 1000 < build.runtime // 1000:
        return (
            f"{PATH.name} was built with CUDA {_version(build.runtime)} and the driver supports CUDA "
            f"{_version(build.driver)} at most: update the driver, or install exgrpo anew with nvcc of CUDA "
            f"{build.driver // 1000} on the PATH and EXGRPO_CUDA=force"
        )
    if capability != CAPABILITY:
        wanted, found = ("{}.{}".format(*one) for one in (CAPABILITY, capability))
        return f"it is written for compute capability {wanted} (Hopper); the device has {found}"
    return ""


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


@cache
def load() -> ctypes.CDLL:
    """The library, its functions declared.

    Raises:
        RuntimeError: it is not there or cannot be loaded.
    """
    try:
        return declared(ctypes.CDLL(str(PATH)))
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"{PATH}: {error}; build it anew with EXGRPO_CUDA=force, or use another backend") from error


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """A library with the signatures of its functions."""
    library.exgrpo_build.restype, library.exgrpo_build.argtypes = Build, ()
    library.exgrpo_product.restype = c_char_p
    library.exgrpo_product.argtypes = (POINTER(ProductArguments), c_void_p)
    return library


class Call:
    """A launch that is being prepared: its arguments, and the tensors that they point to."""

    def __init__(self, function: str, arguments: ctypes.Structure) -> None:
        self.function = function
        self.arguments = arguments
        self._kept: list[torch.Tensor] = []

    def set(self, **values: torch.Tensor | float | None) -> None:
        """Fill fields in; a tensor stays alive as long as the call."""
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                self._kept.append(value)
                setattr(self.arguments, name, value.data_ptr())
            else:
                setattr(self.arguments, name, value)

    def launch(self, device: torch.device) -> None:
        """Enqueue the kernel on the current stream of a device.

        Raises:
            RuntimeError: a CUDA call failed; names it.
        """
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            check(getattr(load(), self.function)(ctypes.byref(self.arguments), stream))


def check(failure: bytes | None) -> None:
    """Raise RuntimeError with what a launcher returned, if that is anything."""
    if failure is not None:
        raise RuntimeError(f"cuda backend: {failure.decode()}")
