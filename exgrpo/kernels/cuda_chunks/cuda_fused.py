"""The fused product where Hopper's matrix units can be kept busy by hand: csrc/cuda/product_kernel.cuh."""

import ctypes
from ctypes import c_int64, c_void_p
from dataclasses import replace

import torch
from torch import Tensor

from exgrpo.kernels import extension
from exgrpo.kernels.chunks.chunking import Cost
from exgrpo.kernels.triton_chunks.fused_product import (
    AnchoredRows,
    FusedProduct,
    GradientRows,
    Operands,
    aligned,
    partial_bytes,
)
from exgrpo.kernels.triton_chunks.launch import Tile
from exgrpo.kernels.triton_chunks.triton_fused import FusedTritonPasses

TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 128, 192, 64
"""Those of csrc/cuda/product.h."""


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


class FusedCudaProduct(FusedProduct):
    """The product in CUDA C++; the few rows that are done again take the Triton kernels."""

    def __init__(self, operands: Operands, tile: Tile) -> None:
        super().__init__(operands, replace(tile, rows=TILE_ROWS, columns=TILE_COLUMNS, depth=TILE_DEPTH))
        self._triton_tile = tile

    def exponentials(self, rows: AnchoredRows, out: Tensor | None, listed: Tensor | None) -> None:
        assert listed is None
        run_product(self.operands, rows, out, self.partial)

    def gradient(self, rows: AnchoredRows, known: GradientRows, out: Tensor) -> None:
        run_product(self.operands, rows, out, None, known)

    def again(self) -> FusedProduct:
        return FusedProduct(self.operands, self._triton_tile)


class FusedCudaPasses(FusedTritonPasses):
    """`FusedTritonPasses` around this product where it can be, around the Triton kernels elsewhere."""

    def cost(self, vocabulary: int, gradient_follows: bool = True) -> Cost:
        # The tiles of both products leave sums.
        cost = super().cost(vocabulary, gradient_follows)
        return cost._replace(row=cost.row + partial_bytes(vocabulary, TILE_COLUMNS))

    def product(self, operands: Operands, out: Tensor | None) -> FusedProduct:
        if fits(operands, out):
            return FusedCudaProduct(operands, self.plan.tile)
        return super().product(operands, out)


def fits(operands: Operands, out: Tensor | None) -> bool:
    """True if the product can describe the matrices: bf16, aligned, not empty."""
    matrices = [operands.hidden, operands.weight, *([] if out is None else [out])]
    return all(matrix.dtype == torch.bfloat16 and aligned(matrix) for matrix in matrices)


def run_product(
    operands: Operands,
    rows: AnchoredRows,
    out: Tensor | None,
    partial: Tensor | None,
    known: GradientRows | None = None,
) -> None:
    """Write exp(d), 0 at the target, to ``out`` and the sums of column tiles to ``partial``; or F.

    Args:
        operands: hidden states and weight in bf16, like ``out`` with unit inner stride; 16 bytes divide their
            addresses and their row strides.
        rows: the n rows of the operands.
        out: [n, V] bf16; None: forward only.
        partial: [2, column tiles, n] fp32; None: F is written.
        known: of the n rows, contiguous; None: exp(d) is written.

    Raises:
        RuntimeError: a CUDA call failed; names it.
    """
    hidden, weight, bias = operands
    target, anchor, temperature = rows
    rests, moments = (None, None) if partial is None else partial
    # Named here, the tensors are alive until the launch: the structure has their addresses alone.
    tensors = {
        "hidden": hidden,
        "weight": weight,
        "out": out,
        "bias": None if bias is None else bias.float().contiguous(),
        "target": target,
        "anchor": anchor.contiguous(),
        "temperature": None if temperature is None else temperature.contiguous(),
        "rests": rests,
        "moments": moments,
        **({} if known is None else known._asdict()),
    }
    arguments = ProductArguments(
        rows=hidden.shape[0],
        vocabulary=weight.shape[0],
        width=hidden.shape[1],
        hidden_stride=hidden.stride(0),
        weight_stride=weight.stride(0),
        out_stride=0 if out is None else out.stride(0),
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()},
    )
    launch(arguments, hidden.device)


def launch(arguments: ProductArguments, device: torch.device) -> None:
    """Enqueue the product on the current stream of a device."""
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        check(extension.cuda_library().exgrpo_product(ctypes.byref(arguments), stream))


def check(failure: bytes | None) -> None:
    """Raise RuntimeError with what a launcher returned, if that is anything."""
    if failure is not None:
        raise RuntimeError(f"cuda backend: {failure.decode()}")
