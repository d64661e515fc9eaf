"""The fused product where Hopper's matrix units can be kept busy by hand: csrc/cuda/product_kernel.cuh."""

from dataclasses import replace

import torch
from torch import Tensor

from exgrpo.kernels.cuda_chunks.binding import PRODUCT_CAPABILITIES, Call, ProductArguments
from exgrpo.kernels.triton_chunks.fused_product import AnchoredRows, FusedProduct, Listed, Operands
from exgrpo.kernels.triton_chunks.launch import Tile
from exgrpo.kernels.triton_chunks.triton_fused import FusedTritonPasses

TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 128, 128, 64
"""Those of csrc/cuda/product.h; the Triton kernels that redo a few rows add to the sums of the same column tiles."""


class FusedCudaProduct(FusedProduct):
    """bfloat16 operands that a tensor map describes, without a cap; anything else takes the Triton kernels.

    The rows that are done again do, too: there are few of them, or none.
    """

    def __init__(self, operands: Operands, softcap: float | None, tile: Tile) -> None:
        hidden = operands.hidden
        self._chosen = hidden.dtype == torch.bfloat16 and softcap is None and _capable(hidden.device)
        if self._chosen:
            tile = replace(tile, rows=TILE_ROWS, columns=TILE_COLUMNS, depth=TILE_DEPTH)
        super().__init__(operands, softcap, tile)

    def exponentials(self, rows: AnchoredRows, out: Tensor | None, listed: Listed | None) -> None:
        """See `FusedProduct`."""
        described = self.describable(out) and (out is None or out.dtype == torch.bfloat16)
        if self._chosen and described and listed is None and self.operands.weight.numel():
            product_call(self.operands, rows, out, self.partial).launch(self.operands.hidden.device)
        else:
            super().exponentials(rows, out, listed)


class FusedCudaPasses(FusedTritonPasses):
    """`FusedTritonPasses` around this product."""

    product = FusedCudaProduct


def product_call(operands: Operands, rows: AnchoredRows, out: Tensor | None, partial: Tensor) -> Call:
    """The call that writes exp(d), 0 at the target, to ``out`` and the sums of column tiles to ``partial``.

    Args:
        operands: hidden states and weight in bf16, like ``out`` with unit inner stride; 16 bytes divide their
            addresses and their row strides.
        rows: the n rows of the operands.
        out: [n, V] bf16; None: forward only.
        partial: [2, column tiles, n] fp32.
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
        rests=partial[0],
        moments=partial[1],
    )
    return call


def _capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) in PRODUCT_CAPABILITIES
