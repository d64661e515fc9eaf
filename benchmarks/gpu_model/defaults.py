"""What the model says about the shipped defaults: is another path or tile faster?"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.gpu_model import constants
from benchmarks.gpu_model.prediction import FUSED, paths_of, predict, way_of
from benchmarks.gpu_model.walk import CUDA, LIBRARY, TRITON, Size, Way
from exgrpo.kernels import backend_choice
from exgrpo.kernels.triton_chunks.launch import Tile, setting, shape_class
from exgrpo.kernels.tune import TILES
from exgrpo.tools.estimate.parts import Gpu


@dataclass(frozen=True)
class Choice:
    """A way, and the seconds that an operation should take on it."""

    way: Way
    seconds: float

    def __str__(self) -> str:
        tile = self.way.plan.tile
        of_tile = f", tile {tile.rows}x{tile.columns}x{tile.depth}" if self.way.path == TRITON else ""
        return f"{self.way.path}, {self.way.chunk_rows} rows{of_tile}"


def shipped(gpu: Gpu, operation: str, size: Size, *, rested: bool = True) -> Choice:
    """What ``auto`` takes for a large head in bf16."""
    logits = setting(gpu.architecture, "bfloat16", shape_class(size.width))["logits"]
    backend = backend_choice.TABLE.setting(gpu.architecture, "bfloat16", "large")["backends"][0]
    path = (CUDA if backend == "cuda" else TRITON) if logits == FUSED else LIBRARY
    return _choice(way_of(gpu, path, size), operation, size, rested)


def best(gpu: Gpu, operation: str, size: Size, *, rested: bool = True) -> Choice:
    """The fastest of the ways that the tuner would try; the shipped one where none is faster."""
    others = (_choice(way, operation, size, rested) for way in ways(gpu, size))
    return min((shipped(gpu, operation, size, rested=rested), *others), key=lambda choice: choice.seconds)


def ways(gpu: Gpu, size: Size) -> Iterator[Way]:
    """Every path, the Triton product with the tuner's tiles, as far as they fit."""
    for path in paths_of(gpu):
        way = way_of(gpu, path, size)
        yield way
        tiles = [Tile(**numbers) for numbers in TILES] if path == TRITON else []
        yield from (replace(way, plan=replace(way.plan, tile=tile)) for tile in tiles if _fits(gpu, tile))


def _fits(gpu: Gpu, tile: Tile) -> bool:
    """Whether shared memory holds the operands of the steps in flight."""
    return (tile.rows + tile.columns) * tile.depth * 2 * tile.stages <= constants.SHARED_MEMORY[gpu.architecture] << 10


def _choice(way: Way, operation: str, size: Size, rested: bool) -> Choice:
    return Choice(way, predict(way, operation, size, rested=rested).seconds)
