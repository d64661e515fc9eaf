"""Launches of the Triton kernels by architecture, dtype and width."""

import os
from dataclasses import dataclass, replace
from functools import cache

import torch

from exgrpo.kernels.backend_choice import architecture

WIDE = 2560
LEAST_BLOCK = 128
MEMORY_SHARE = 16
"""A call without a bound takes at most the device's memory divided by this."""


@dataclass(frozen=True)
class Launch:
    """Launch of a kernel with one program per row.

    Attributes:
        block: columns that are worked on at once.
        warps: warps of a program.
    """

    block: int
    warps: int


@dataclass(frozen=True)
class Tile:
    """Launch of the product whose epilogue is the softmax, for operands of 16 bits.

    Attributes:
        rows: tokens of a tile.
        columns: vocabulary entries of a tile.
        depth: length of a step along D.
        warps: warps of a program.
        stages: steps whose loads are in flight.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class LaunchPlan:
    """Launches of a call.

    Attributes:
        fused: logits are formed by the product whose epilogue is the softmax, else by the library's.
        memory: bytes that a call may allocate besides its inputs, its outputs and the gradients with their sums, if it
            has no bound. It decides how many tokens a chunk has. The gradient of the weight, [V, D] in float32, is read
            and written once per chunk, so few chunks matter; one chunk alone has no such sum, and may take its bytes.
        rows: launch of the row kernels.
        tile: launch of the fused product.
    """

    fused: bool
    memory: int
    rows: Launch
    tile: Tile


DEFAULT = LaunchPlan(fused=False, memory=1 << 30, rows=Launch(2048, 8), tile=Tile(64, 64, 32, 4, 2))
# Timed on an H100 80GB HBM3, 2026-11-22, torch 2.11.0, triton 3.6.0, CUDA 13.0, at (T, D, V) = (8192, 1536, 151936) and
# (8192, 3584, 152064), forward and policy loss: narrow 25.4 ms fused and 30.2 by the library's product, wide 54.5 and
# 63.9. The policy loss in chunks of 1024, 2048, 4096 and 8192 rows: narrow 24.3, 21.1, 19.9 and 18.7 ms, wide 57.0,
# 47.6, 44.5 and 42.5; chunks of 16384 rows are no faster for T = 16384. float16, 2026-11-23 at (8192, 1536, 151936):
# forward, policy loss, log-probs with their backward 6.8, 18.4 and 24.6 ms fused, 8.7, 20.7 and 28.7 by the library's.
_HOPPER = replace(DEFAULT, rows=Launch(4096, 8), tile=Tile(128, 256, 64, 8, 3))
_HOPPER_BFLOAT16 = replace(_HOPPER, fused=True, rows=Launch(4096, 16))
# Blocks and tiles of the others were chosen so that the kernels compile without spilling registers and fit into shared
# memory; none was timed. That Blackwell's product is fused is a prediction: a cost model has 16.3 ms with it for the
# policy loss at (8192, 4096, 128256) in bfloat16, and 19 by the library's product in chunks of 1152 rows.
_BLACKWELL = replace(DEFAULT, rows=Launch(4096, 8), tile=Tile(128, 128, 64, 8, 4))
_BLACKWELL_FUSED = replace(_BLACKWELL, fused=True, tile=Tile(128, 256, 64, 8, 3))
PLANS = {
    "cpu": replace(DEFAULT, memory=16 << 20, tile=Tile(16, 128, 64, 1, 1)),  # the interpreter
    "sm_80": replace(DEFAULT, rows=Launch(4096, 8), tile=Tile(128, 128, 64, 8, 3)),
    "sm_90": _HOPPER,
    "sm_90 bfloat16 narrow": replace(_HOPPER_BFLOAT16, tile=Tile(128, 256, 64, 8, 4)),
    "sm_90 bfloat16 wide": _HOPPER_BFLOAT16,
    "sm_90 float16": replace(_HOPPER, fused=True),
    "sm_100": _BLACKWELL,
    "sm_100 bfloat16": _BLACKWELL_FUSED,
    "sm_100 float16": _BLACKWELL_FUSED,
    "sm_120": replace(DEFAULT, rows=Launch(4096, 8), tile=Tile(128, 128, 64, 8, 3)),
    "gfx942": replace(DEFAULT, tile=Tile(128, 128, 64, 8, 2)),
}
"""Plans by architecture, dtype of the operands and class of widths (narrow: D < WIDE); the most specific decides."""


@cache
def plan(device: torch.device, operand: torch.dtype, width: int, vocabulary: int) -> LaunchPlan:
    """Return the plan of a call whose operands are [rows, width] and [vocabulary, width] of dtype ``operand``."""
    chosen = planned(architecture(device), operand, width)
    block = min(chosen.rows.block, fitting_block(vocabulary))
    memory = min(chosen.memory, _memory(device) // MEMORY_SHARE)
    return replace(chosen, memory=memory, rows=replace(chosen.rows, block=block))


def planned(name: str, operand: torch.dtype, width: int) -> LaunchPlan:
    """Return the plan of PLANS for an architecture; an unknown GPU has that of an older one of its generation."""
    # sm_80 for sm_86, sm_87 and sm_89, sm_120 for sm_121
    older = [known for known in PLANS if known[:-1] == name[:-1] and known <= name and name.startswith("sm_")]
    name = max(older, default=name)
    dtype = str(operand).removeprefix("torch.")
    keys = (f"{name} {dtype} {'wide' if width >= WIDE else 'narrow'}", f"{name} {dtype}", name)
    return next((PLANS[key] for key in keys if key in PLANS), DEFAULT)


def fitting_block(vocabulary: int) -> int:
    """Return the smallest block that holds a whole row."""
    return max(LEAST_BLOCK, 1 << (vocabulary - 1).bit_length() if vocabulary > 1 else 1)


@cache
def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; the interpreter takes two."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
