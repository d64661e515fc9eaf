"""The fused product where Hopper's matrix units can be kept busy by hand: csrc/cuda/product_kernel.cuh."""

from dataclasses import replace

import torch
from torch import Tensor

from exgrpo.kernels.chunks.chunking import Cost
from exgrpo.kernels.cuda_chunks.binding import Call, ProductArguments
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


class FusedCudaProduct(FusedProduct):
    """The product in CUDA C++; the few rows that are done again take the Triton kernels."""

    def __init__(self, operands: Operands, tile: Tile) -> None:
        super().__init__(operands, None, replace(tile, rows=TILE_ROWS, columns=TILE_COLUMNS, depth=TILE_DEPTH))
        self._triton_tile = tile

    def exponentials(self, rows: AnchoredRows, out: Tensor | None, listed: Tensor | None) -> None:
        assert listed is None
        product_call(self.operands, rows, out, self.partial).launch(self.operands.hidden.device)

    def gradient(self, rows: AnchoredRows, known: GradientRows, out: Tensor) -> None:
        product_call(self.operands, rows, out, None, known).launch(self.operands.hidden.device)

    def again(self) -> FusedProduct:
        return FusedProduct(self.operands, None, self._triton_tile)


class FusedCudaPasses(FusedTritonPasses):
    """`FusedTritonPasses` around this product where it can be, around the Triton kernels elsewhere."""

    def cost(self, vocabulary: int, gradient_follows: bool = True) -> Cost:
        # The tiles of both products leave sums.
        cost = super().cost(vocabulary, gradient_follows)
        return cost._replace(row=cost.row + partial_bytes(vocabulary, TILE_COLUMNS))

    def product(self, operands: Operands, out: Tensor | None) -> FusedProduct:
        if self.softcap is None and fits(operands, out):
            return FusedCudaProduct(operands, self.plan.tile)
        return super().product(operands, out)


def fits(operands: Operands, out: Tensor | None) -> bool:
    """True if the product can describe the matrices: bf16, aligned, not empty."""
    matrices = [operands.hidden, operands.weight, *([] if out is None else [out])]
    return all(matrix.dtype == torch.bfloat16 and aligned(matrix) for matrix in matrices)


def product_call(
    operands: Operands,
    rows: AnchoredRows,
    out: Tensor | None,
    partial: Tensor | None,
    known: GradientRows | None = None,
) -> Call:
    """The call that writes exp(d), 0 at the target, to ``out`` and the sums of column tiles to ``partial``; or F.

    Args:
        operands: hidden states and weight in bf16, like ``out`` with unit inner stride; 16 bytes divide their
            addresses and their row strides.
        rows: the n rows of the operands.
        out: [n, V] bf16; None: forward only.
        partial: [2, column tiles, n] fp32; None: F is written.
        known: of the n rows, contiguous; None: exp(d) is written.
    """
    hidden, weight, bias = operands
    target, anchor, temperature = rows
    shape = {"rows": hidden.shape[0], "vocabulary": weight.shape[0], "width": hidden.shape[1]}
    call = Call("exgrpo_product", ProductArguments(**shape))
    call.set(
        hidden=hidden,
        hidden_stride=hidden.stride(0),
        weight=weight,
        weight_stride=weight.stride(0),
        out=out,
        out_stride=0 if out is None else out.stride(0),
        bias=None if bias is None else bias.float().contiguous(),
        target=target,
        anchor=anchor.contiguous(),
        temperature=None if temperature is None else temperature.contiguous(),
        rests=None if partial is None else partial[0],
        moments=None if partial is None else partial[1],
    )
    if known is not None:
        call.set(**known._asdict())
    return call
