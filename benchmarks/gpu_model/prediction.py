"""Time, traffic, launches, waves and memory of a call, from its steps."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from benchmarks.gpu_model import constants
from benchmarks.gpu_model.walk import (
    CUDA,
    F32,
    LIBRARY,
    PATHS,
    Size,
    Step,
    Way,
    floor_steps,
    launches,
    partials_of,
    peak_bytes,
    steps,
)
from exgrpo.kernels.chunks import chunking
from exgrpo.kernels.chunks.products import row_cost
from exgrpo.kernels.cuda_chunks.binding import CAPABILITY
from exgrpo.kernels.triton_chunks.launch import plan_from, setting, shape_class
from exgrpo.kernels.triton_chunks.triton_passes import aligned_columns, rows_of
from exgrpo.tools.estimate.parts import GPUS, Gpu

FUSED, OPERAND = "fused", torch.bfloat16


@dataclass(frozen=True)
class Prediction:
    """What a call should take.

    Attributes:
        seconds: from the first launch to the end.
        bytes: of device memory that are read and written, operands and results of each step once.
        launches: of kernels.
        tiles, waves: of all its products.
        peak: bytes beyond the inputs at the fullest moment, gradients included.
    """

    seconds: float
    bytes: float
    launches: int
    tiles: int
    waves: int
    peak: int

    @property
    def filled(self) -> float:
        """Tiles per wave."""
        return self.tiles / self.waves


class UnknownGpu(ValueError):
    """There is no data sheet of this name."""


def gpu_of(name: str) -> Gpu:
    """A data sheet by its name or by that which the driver gives, in any case.

    Raises:
        UnknownGpu: there is none.
    """
    wanted = name.replace(" ", "").lower()
    for known in (*GPUS, *constants.DEVICES):
        if wanted == known.replace(" ", "").lower():
            return GPUS[constants.DEVICES.get(known, known)]
    raise UnknownGpu(f"gpu: there is no data sheet of {name!r}; expected one of {', '.join(GPUS)}")


def paths_of(gpu: Gpu) -> list[str]:
    """The paths that a GPU has."""
    major, minor = CAPABILITY
    return [path for path in PATHS if path != CUDA or gpu.architecture == f"sm_{major}{minor}"]


def way_of(gpu: Gpu, path: str, size: Size) -> Way:
    """A path as the launch table plans it."""
    entry = setting(gpu.architecture, "bfloat16", shape_class(size.width))
    plan = plan_from(
        {**entry, "logits": LIBRARY if path == LIBRARY else FUSED}, size.vocabulary, int(gpu.memory * 2**30)
    )
    # As the passes say it: exponentials are what the products would round, logits come beside it.
    row = row_cost(OPERAND, size.width, size.vocabulary) + chunking.ROW_BYTES
    row += F32 * aligned_columns(size.vocabulary) if path == LIBRARY else partials_of(path, plan, size.vocabulary)
    alone = row if path == LIBRARY else row - OPERAND.itemsize * size.vocabulary
    rows, forward_rows = (
        rows_of(plan, None, size.tokens, size.width, chunking.Cost(0, each, ()), gpu.multiprocessors)
        for each in (row, alone)
    )
    return Way(gpu, path, plan, rows, forward_rows)


def predict(way: Way, operation: str, size: Size, *, rested: bool = True) -> Prediction:
    """A call of an operation on a path; ``rested``: the device was idle before, so that its clock is high."""
    todo = list(steps(way, operation, size))
    count = launches(way, operation, size)
    return _sum(way.gpu, todo, count, peak_bytes(way, operation, size), rested)


def floor(gpu: Gpu, operation: str, size: Size, *, rested: bool = True) -> Prediction:
    """The bare matrix products of an operation, into memory that is there already."""
    todo = list(floor_steps(gpu, operation, size))
    return _sum(gpu, todo, len(todo), 0, rested)


def _sum(gpu: Gpu, todo: Iterable[Step], count: int, peak: int, rested: bool) -> Prediction:
    products = [step.product for step in todo if step.product]
    bandwidth = constants.BANDWIDTH_SHARE * gpu.bandwidth * 1e9
    alone = sum(step.read + step.written for step in todo if not step.product) / bandwidth
    beside = constants.EXPOSED_SHARE * sum(step.written for step in todo if step.product) / bandwidth
    sustained = sum(one.flops for one in products) / (constants.SUSTAINED_SHARE * gpu.bf16 * 1e12)
    multiplied = max(sum(one.seconds for one in products), sustained - constants.CREDIT * rested)
    return Prediction(
        seconds=multiplied + alone + beside + count * constants.LAUNCH,
        bytes=sum(step.read + step.written for step in todo),
        launches=count,
        tiles=sum(one.tiles for one in products),
        waves=sum(one.waves for one in products),
        peak=peak,
    )
