"""Matrix products: tiles over multiprocessors, in whole waves."""

from dataclasses import dataclass
from math import ceil

from benchmarks.gpu_model import constants
from exgrpo.kernels.cuda_chunks import cuda_fused
from exgrpo.kernels.triton_chunks.launch import Tile
from exgrpo.tools.estimate.parts import Gpu


@dataclass(frozen=True)
class Product:
    """One product of matrices [m, k] and [k, n] in bf16.

    Attributes:
        flops: 2 m n k.
        seconds: at the clock of a device that was idle before, results that nothing hides left out.
        tiles: of the result.
        waves: times that every multiprocessor takes a tile; the last one may be partly empty.
    """

    flops: float
    seconds: float
    tiles: int
    waves: int


def per_multiprocessor(gpu: Gpu) -> float:
    """FLOP/s of a library's main loop on one multiprocessor."""
    return constants.PEAK_SHARE * gpu.bf16 * 1e12 / gpu.multiprocessors


def library_product(gpu: Gpu, m: int, n: int, k: int) -> Product:
    """By the tiles with which it takes least."""

    def with_tiles(rows: int, columns: int, speed: float) -> Product:
        tiles = ceil(m / rows) * ceil(n / columns)
        waves = ceil(tiles / gpu.multiprocessors)
        seconds = waves * 2 * rows * columns * k / (speed * per_multiprocessor(gpu))
        return Product(2 * m * n * k, seconds, tiles, waves)

    return min((with_tiles(*sides, speed) for sides, speed in constants.LIBRARY_TILES.items()), key=lambda p: p.seconds)


def triton_product(gpu: Gpu, m: int, n: int, k: int, tile: Tile) -> Product:
    """The product whose epilogue is the softmax: each multiprocessor has one tile at a time, and then its epilogue."""
    tiles = ceil(m / tile.rows) * ceil(n / tile.columns)
    waves = ceil(tiles / gpu.multiprocessors)
    step = 2 * tile.rows * tile.columns * tile.depth / per_multiprocessor(gpu) + constants.TRITON_STEP
    return Product(2 * m * n * k, waves * (ceil(k / tile.depth) * step + _epilogue(gpu, tile)), tiles, waves)


def cuda_product(gpu: Gpu, m: int, n: int, k: int) -> Product:
    """The one for Hopper: the epilogue of a tile is under the main loop of the next, and clusters share tiles."""
    tile = Tile(cuda_fused.TILE_ROWS, cuda_fused.TILE_COLUMNS, cuda_fused.TILE_DEPTH, warps=0, stages=0)
    tiles = constants.CUDA_CLUSTER * ceil(m / (constants.CUDA_CLUSTER * tile.rows)) * ceil(n / tile.columns)
    waves = ceil(tiles / (gpu.multiprocessors // constants.CUDA_CLUSTER * constants.CUDA_CLUSTER))
    step = 2 * tile.rows * tile.columns * tile.depth / per_multiprocessor(gpu) + constants.CUDA_STEP
    loop, epilogue = ceil(k / tile.depth) * step, _epilogue(gpu, tile)
    return Product(2 * m * n * k, waves * max(loop, epilogue) + epilogue, tiles, waves)


def _epilogue(gpu: Gpu, tile: Tile) -> float:
    """Seconds of a tile's epilogue."""
    return tile.rows * tile.columns * constants.EPILOGUE / (gpu.fp32 * 1e12 / gpu.multiprocessors)
