"""Calls of the library for GPUs, which is loaded when it is first needed."""

import ctypes
from ctypes import c_int64, c_void_p

import torch

from exgrpo.kernels import extension


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
        ("at_target", c_void_p),
        ("intercept", c_void_p),
        ("slope", c_void_p),
    )


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
            check(getattr(extension.cuda_library(), self.function)(ctypes.byref(self.arguments), stream))


def check(failure: bytes | None) -> None:
    """Raise RuntimeError with what a launcher returned, if that is anything."""
    if failure is not None:
        raise RuntimeError(f"cuda backend: {failure.decode()}")
