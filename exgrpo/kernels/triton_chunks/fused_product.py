"""The softmax statistics of a linear head straight from its product: no matrix of logits is ever written.

With the target's logit as anchor, known beforehand by a product per token, d_v = (z_v - z_y) / tau is known as soon as
z_v is: the product's tiles write exp(d_v), and their sums merge by addition, over tiles and over ranks. No running
maximum, no rescaling, no second reading. The few rows whose target is next to impossible are done again, listed and
counted on the device, from their largest logit; where there are none, two empty launches are all it costs.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from exgrpo.kernels.chunks.head import Targets
from exgrpo.kernels.chunks.softmax import LARGEST_SUM, Sums
from exgrpo.kernels.inputs import VocabShard
from exgrpo.kernels.triton_chunks.fused_kernels import (
    anchor_kernel,
    exponentials_kernel,
    largest_kernel,
    list_kernel,
    merge_kernel,
    target_logit_kernel,
)
from exgrpo.kernels.triton_chunks.launch import Tile, architecture, multiprocessors

LARGEST_SUM_FLOAT16 = 2.0**9
"""The same limit as `softmax.LARGEST_SUM` for exponentials in fp16: p_y is 2e-3. They end at 2^16, and what multiplies
them in the gradient of the weight is divided by S: it must not be so small that fp16 has few digits left for it."""
SMALLEST_TILE = 16
"""Rows that the units of the matrix product need."""
MERGED = {"TILES": 64, "ROWS": 32}
"""Column tiles and rows whose sums a program reads at once."""
LISTED = 4096
"""Rows that are looked at at once."""
ALIGNMENT = 16
"""Bytes that have to divide a matrix's address and its row stride for a tensor descriptor."""


def fused_sums(
    product: "FusedProduct", targets: Targets, temperature: Tensor | None, shard: VocabShard, out: Tensor | None
) -> Sums:
    """Write the exponentials of a head's shifted logits, and return their sums.

    All happens on the device: the host never waits. Equal inputs give equal bits; what is NaN stays NaN.

    Args:
        product: of the n rows of a chunk.
        targets: of these rows.
        temperature: [n] fp32, contiguous; None: 1.
        shard: merges over the ranks.
        out: [n, V] bf16, fp16 or fp32, unit stride along V: receives exp(d_v), 0 at the target. None: forward only. It
            is written fastest where 16 bytes divide its row stride, whatever V is; then all of the 16 bytes are written
            in which a row ends.
    """
    hidden, target = product.operands.hidden, targets.local()
    if not target.numel():
        empty = torch.empty(0, dtype=torch.float32, device=hidden.device)
        return Sums(empty, empty, empty, empty)
    (at_target,) = shard.largest_of(product.target_logits(target))
    product.exponentials(AnchoredRows(target, at_target, temperature), out, None)
    own = product.sums()
    # Beyond the limit, overflown, or NaN, which this mends but where the operands or the target's logit are NaN.
    # By the operands alone: with and without ``out`` the anchors are the same.
    far = Far(shard.sum_of(*own)[0], _largest_sum(hidden.dtype))
    listed, again = far.listed(), product.again()
    (anchor,) = shard.largest_of(again.anchors(far, listed, at_target))
    rows = AnchoredRows(target, anchor, temperature)
    again.exponentials(rows, out, listed)
    *found, gap = again.sums_again(far, own, rows, at_target)
    return Sums(anchor, gap, *shard.sum_of(*found))


class Traits(NamedTuple):
    """Compilation of the product's kernel for an architecture, chosen so that everything stays in registers."""

    described: bool
    """Whole tiles are read and written through tensor descriptors."""
    overlapped: bool
    """The next tile's loads begin before the epilogue of this one."""
    parts: int
    """Of a tile's columns, taken one after the other by the epilogue."""


def traits(name: str) -> Traits:
    """Return the traits of an architecture of `launch`."""
    return Traits(
        described=name.startswith(("sm_9", "sm_10", "cpu")),
        overlapped=name.startswith(("sm_9", "cpu")),
        # Tensor memory holds a tile as a whole; AMD's parts would be moved through shared memory.
        parts=1 if name.startswith(("sm_10", "gfx")) else 2,
    )


def tile_with_bias(tile: Tile, name: str) -> Tile:
    """Return the tile of products with a bias: an epilogue over a wide tile as a whole has no registers for it."""
    return replace(tile, columns=min(tile.columns, 128)) if traits(name).parts == 1 else tile


def half_tile(tile: Tile) -> Tile:
    """Return half a tile, for pointers in the descriptors' place: they need more registers."""
    return replace(tile, rows=max(SMALLEST_TILE, tile.rows // 2))


class Far(NamedTuple):
    """The rows that are done again, whose number only the device knows: those whose S is not within the limit."""

    rest: Tensor
    """[n] fp32: S, over all ranks."""
    limit: float

    def listed(self) -> Tensor:
        """[n + 1] int32: these rows in order, then numbers beyond all rows; the last is how many they are."""
        listed = self.rest.new_empty(len(self.rest) + 1, dtype=torch.int32)
        with torch.cuda.device_of(listed):
            list_kernel[(1,)](*self, listed, len(self.rest), BLOCK=LISTED, num_warps=8)
        return listed


class Operands(NamedTuple):
    """Factors of a chunk's logits."""

    hidden: Tensor
    """[n, D] bf16 or fp16, contiguous."""
    weight: Tensor
    """[V, D] of the same dtype, this rank's part; any strides, V may be 0."""
    bias: Tensor | None
    """[V], any float dtype."""


class AnchoredRows(NamedTuple):
    """Numbers of each row by which a logit becomes exp(d)."""

    target: Tensor
    """[n] int64, index into the weight; -1 where another rank holds it."""
    anchor: Tensor
    """[n] fp32."""
    temperature: Tensor | None
    """[n] fp32, contiguous; None: 1."""


class GradientRows(NamedTuple):
    """Numbers of each row by which exp(d) becomes F = exp(d) (intercept + slope d), all [n] fp32."""

    at_target: Tensor
    """F at the target."""
    intercept: Tensor | None
    """c - h U; None, as ``slope``: 1 and 0."""
    slope: Tensor | None
    """h."""


class FusedProduct:
    """hidden @ weight.T in tiles, and the sums of each tile for each of its rows."""

    def __init__(self, operands: Operands, tile: Tile) -> None:
        hidden, weight, bias = operands
        self.operands = Operands(hidden, weight, None if bias is None else bias.contiguous())
        self.tile = tile
        self.traits = traits(architecture(hidden.device))
        self.column_tiles = triton.cdiv(weight.shape[0], tile.columns)

    @cached_property
    def partial(self) -> Tensor:
        """S and M of each tile, [2, column tiles, n]."""
        hidden = self.operands.hidden
        return torch.empty(2, self.column_tiles, len(hidden), dtype=torch.float32, device=hidden.device)

    def target_logits(self, target: Tensor) -> Tensor:
        """z_y [n], -inf where it is not held."""
        hidden, weight, bias = self.operands
        rows, width = hidden.shape
        logits = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        with torch.cuda.device_of(hidden):
            target_logit_kernel[(rows,)](
                hidden,
                weight,
                bias,
                target,
                logits,
                width,
                *weight.stride(),
                BLOCK=min(1024, triton.next_power_of_2(width)),
                num_warps=4,
            )
        return logits

    def exponentials(self, rows: AnchoredRows, out: Tensor | None, listed: Tensor | None) -> None:
        """Write exp(d) and the sums of all rows, or of the listed ones."""
        self._epilogues(rows, out, listed, *self.partial, *3 * (None,))

    def gradient(self, rows: AnchoredRows, known: GradientRows, out: Tensor) -> None:
        """Write F of all rows, whose sums are known."""
        self._epilogues(rows, out, None, None, None, *known)

    def _epilogues(
        self, rows: AnchoredRows, out: Tensor | None, listed: Tensor | None, *results: Tensor | None
    ) -> None:
        described = listed is None and self.describable(out)
        usual = described or (listed is None and not self.traits.described)
        tile = self.tile if usual else half_tile(self.tile)
        (hidden, weight, bias), written = self.operands, out
        parts = self.traits.parts
        if described:
            hidden = TensorDescriptor.from_tensor(hidden, [tile.rows, tile.depth])
            weight = TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth])
            if out is not None:
                written = TensorDescriptor.from_tensor(out, [tile.rows, tile.columns // parts])
        self._launch(
            exponentials_kernel,
            tile,
            hidden,
            weight,
            bias,
            *rows,
            listed,
            written,
            *results,
            out_stride=0 if out is None else out.stride(0),
            DESCRIBED=described,
            OVERLAPPED=described and self.traits.overlapped,
            PARTS=parts,
        )

    def again(self) -> "FusedProduct":
        """The product that does listed rows again; the sums of other rows are lost."""
        return self

    def sums(self) -> Tensor:
        """S and M, [2, n], over the tiles."""
        return self._merged(2, *6 * (None,))

    def sums_again(self, far: Far, own: Tensor, rows: AnchoredRows, at_target: Tensor) -> Tensor:
        """S, M and d_y, [3, n]: from ``own`` sums [2, n] but for the rows that were done again; z_y [n]."""
        return self._merged(3, own, *far, at_target, rows.anchor, rows.temperature)

    def anchors(self, far: Far, listed: Tensor, at_target: Tensor) -> Tensor:
        """The largest logits [n] of the listed rows, z_y of others; the sums are lost for the listed ones."""
        anchors, partial = torch.empty_like(at_target), self.partial[0]
        self._launch(largest_kernel, half_tile(self.tile), *self.operands, listed, partial)
        with torch.cuda.device_of(anchors):
            anchor_kernel[self._merging()](partial, *far, at_target, anchors, *partial.shape, **MERGED)
        return anchors

    def _merged(self, fields: int, *others: Tensor | float | None) -> Tensor:
        results = self.partial.new_empty(fields, self.partial.shape[2])
        with torch.cuda.device_of(results):
            merge_kernel[self._merging()](*self.partial, results, *others, *self.partial.shape[1:], **MERGED)
        return results

    def _merging(self) -> tuple[int]:
        return (triton.cdiv(self.partial.shape[2], MERGED["ROWS"]),)

    def _launch(self, kernel: Any, tile: Tile, *arguments: object, **more: object) -> None:
        hidden, weight, _ = self.operands
        rows, width = hidden.shape
        tiles = triton.cdiv(rows, tile.rows) * self.column_tiles
        if not tiles:
            return
        with torch.cuda.device_of(hidden):
            kernel[(min(tiles, multiprocessors(hidden.device)),)](
                *arguments,
                rows=rows,
                vocabulary=weight.shape[0],
                width=width,
                vocabulary_stride=weight.stride(0),
                width_stride=weight.stride(1),
                **more,
                ROWS=tile.rows,
                COLUMNS=tile.columns,
                DEPTH=tile.depth,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )

    def describable(self, out: Tensor | None) -> bool:
        """True if the matrices can be read and written through tensor descriptors."""
        matrices = (self.operands.hidden, self.operands.weight, out)
        return self.traits.described and all(aligned(matrix) for matrix in matrices if matrix is not None)


def partial_bytes(vocabulary: int, columns: int) -> int:
    """Bytes of S and M of each tile that a row crosses."""
    return 2 * 4 * -(-vocabulary // columns)


def aligned(matrix: Tensor) -> bool:
    """True if a descriptor can be made of a matrix."""
    return (
        matrix.numel() > 0
        and matrix.stride(1) == 1
        and matrix.stride(0) * matrix.itemsize % ALIGNMENT == 0
        and matrix.data_ptr() % ALIGNMENT == 0
    )


def _largest_sum(operand: torch.dtype) -> float:
    return LARGEST_SUM_FLOAT16 if operand == torch.float16 else LARGEST_SUM
