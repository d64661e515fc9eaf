"""The compiled kernels: _cuda.so, loaded when it is first needed, and its functions with their signatures."""

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

PATH = Path(__file__).with_name("_cuda.so")
"""Built by setup.py where nvcc is."""
ROW_CAPABILITIES = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities that csrc/cuda/rows.cu is compiled for."""
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


class Signature(NamedTuple):
    """Of one of the library's functions."""

    result: type
    arguments: tuple[type, ...]


SIGNATURES = {
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
        return f"{PATH.name} is not built: install exgrpo anew with nvcc on the PATH and EXGRPO_CUDA=force"
    found = torch.cuda.get_device_capability(device)
    if found not in ROW_CAPABILITIES:
        known = ", ".join(f"{major}.{minor}" for major, minor in ROW_CAPABILITIES)
        return f"it is compiled for compute capability {known}; the device has {found[0]}.{found[1]}"
    return ""


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
