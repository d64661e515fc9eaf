"""The compiled kernels: _cuda.so, loaded when it is first needed, and its functions with their signatures."""

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from exgrpo.kernels.built import why_missing

PATH = Path(__file__).with_name("_cuda.so")
"""Built by setup.py where nvcc is."""
ROW_CAPABILITIES = {(9, 0): 900, (10, 0): 1000, (10, 3): 1000}
"""Compute capabilities that csrc/cuda/rows.cu can be compiled for, and the architecture that each runs."""
PRODUCT_CAPABILITIES = ((9, 0),)
"""And csrc/cuda/product.cu: the matrix units of other GPUs are programmed in other ways."""


class Output(IntEnum):
    """What the row kernel writes: csrc/cuda/rows.h."""

    NOTHING = 0
    EXPONENTIALS = 1
    GRADIENT = 2


class RowsArguments(ctypes.Structure):
    """Field by field that of csrc/cuda/rows.h."""

    _fields_ = (
        ("rows", c_int64),
        ("vocabulary", c_int64),
        ("logits", c_void_p),
        ("stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("out_is_bfloat16", c_int32),
        ("output", c_int32),
        ("bias", c_void_p),
        ("target", c_void_p),
        ("temperature", c_void_p),
        ("softcap", c_float),
        ("anchor", c_void_p),
        ("gap", c_void_p),
        ("rest", c_void_p),
        ("moment", c_void_p),
        ("old_log_prob", c_void_p),
        ("advantage", c_void_p),
        ("replayed", c_void_p),
        ("normalizer", c_void_p),
        ("has_clip", c_int32),
        ("has_beta", c_int32),
        ("clip_low", c_float),
        ("clip_high", c_float),
        ("log_beta", c_float),
        ("entropy_coef", c_float),
        ("results", c_void_p),
    )


class ProductArguments(ctypes.Structure):
    """Field by field that of csrc/cuda/product.h."""

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


class RowsPlan(ctypes.Structure):
    """How a row is shared out over a cluster: csrc/cuda/rows.h."""

    _fields_ = (("cluster", c_int32), ("threads", c_int32), ("columns", c_int32), ("shared_bytes", c_int32))


class Build(ctypes.Structure):
    """What the library was built with, and the newest CUDA that the driver supports: csrc/cuda/build.h."""

    _fields_ = (("runtime", c_int32), ("driver", c_int32), ("architectures", c_char_p))


class Signature(NamedTuple):
    """Of one of the library's functions."""

    result: type
    arguments: tuple[type, ...]


SIGNATURES = {
    "exgrpo_build": Signature(Build, ()),
    "exgrpo_rows_plan": Signature(RowsPlan, (c_int64,)),
    "exgrpo_rows": Signature(c_char_p, (POINTER(RowsArguments), c_void_p)),
    "exgrpo_product": Signature(c_char_p, (POINTER(ProductArguments), c_void_p)),
}


def unavailable(device: torch.device) -> str:
    """Why the kernels cannot run on a device; empty where they can."""
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
    """Why a library cannot run with its driver on a device of this compute capability; empty where it can.

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
    built = [int(architecture) for architecture in build.architectures.split(b",")]
    known = [found for found, architecture in ROW_CAPABILITIES.items() if architecture in built]
    if capability not in known:
        compiled, found = ", ".join(f"{major}.{minor}" for major, minor in known), "{}.{}".format(*capability)
        newer = "; install exgrpo anew with a newer nvcc on the PATH and EXGRPO_CUDA=force"
        remedy = newer if capability in ROW_CAPABILITIES else ""
        return f"it is compiled for compute capability {compiled}; the device has {found}{remedy}"
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
    for name, signature in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = signature
    return library


class Call:
    """A launch that is being prepared: its arguments, and the tensors that they point to."""

    def __init__(self, function: str, arguments: ctypes.Structure) -> None:
        self.function = function
        self.arguments = arguments
        self._kept: list[torch.Tensor] = []

    def set(self, **values: torch.Tensor | float | None) -> None:
        """Fills fields in; a tensor stays alive as long as the call."""
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                self._kept.append(value)
                setattr(self.arguments, name, value.data_ptr())
            else:
                setattr(self.arguments, name, value)

    def launch(self, device: torch.device) -> None:
        """Enqueues the kernel on the current stream of a device.

        Raises:
            RuntimeError: a CUDA call failed; names it.
        """
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            check(getattr(load(), self.function)(ctypes.byref(self.arguments), stream))


def check(failure: bytes | None) -> None:
    """Raises RuntimeError with what a launcher returned, if that is anything."""
    if failure is not None:
        raise RuntimeError(f"cuda backend: {failure.decode()}")
