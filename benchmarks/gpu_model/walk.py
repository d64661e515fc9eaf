"""What a call does, step after step: the walk of exgrpo/kernels/chunks, counted instead of run."""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.gpu_model import constants
from benchmarks.gpu_model.products import Product, cuda_product, library_product, triton_product
from exgrpo.kernels.chunks import chunking
from exgrpo.kernels.cuda_chunks import cuda_fused
from exgrpo.kernels.triton_chunks.fused_product import partial_bytes
from exgrpo.kernels.triton_chunks.launch import Plan
from exgrpo.kernels.triton_chunks.triton_passes import aligned_columns
from exgrpo.tools.estimate.parts import Gpu
from exgrpo.tools.heads import FORWARD, LOG_PROB, POLICY_LOSS, WITH_ENTROPY

LIBRARY, TRITON, CUDA = "library", "triton", "cuda"
PATHS = {
    LIBRARY: "library products and Triton row kernels",
    TRITON: "the fused product by Triton",
    CUDA: "the fused product by CUDA C++, on Hopper",
}
B16, F32 = 2, 4
"""Bytes of a number."""


@dataclass(frozen=True)
class Size:
    """T tokens, width D and vocabulary V of a bf16 head; every token has a gradient, nothing is clipped."""

    tokens: int
    width: int
    vocabulary: int


@dataclass(frozen=True)
class Step:
    """A product, or kernels that only read and write.

    Attributes:
        name: what is done.
        read, written: bytes of device memory, each operand and result once.
        product: None for the others.
    """

    name: str
    read: float
    written: float
    product: Product | None = None


@dataclass(frozen=True)
class Way:
    """A path with its plan, on a GPU.

    Attributes:
        chunk_rows: of a chunk at most, where gradients are formed.
        forward_rows: where none are.
        scales: whether the backward of a loss multiplies the gradients by 1.
    """

    gpu: Gpu
    path: str
    plan: Plan
    chunk_rows: int
    forward_rows: int
    scales: bool = False

    def chunks(self, tokens: int, *, gradient: bool = True) -> list[int]:
        """Rows of the chunks."""
        rows = self.chunk_rows if gradient else self.forward_rows
        return [end - begin for begin, end in chunking.spans(tokens, rows, chunking.TILE_ROWS)]

    def partials(self, rows: int, vocabulary: int) -> int:
        """Bytes of the sums of column tiles that a fused product leaves."""
        return rows * partials_of(self.path, self.plan, vocabulary)


def partials_of(path: str, plan: Plan, vocabulary: int) -> int:
    """Bytes of the sums of column tiles that a row leaves; the CUDA product has two kinds of tiles."""
    columns = [plan.tile.columns] + [cuda_fused.TILE_COLUMNS] * (path == CUDA)
    return sum(partial_bytes(vocabulary, one) for one in columns)


def steps(way: Way, operation: str, size: Size) -> Iterator[Step]:
    """Everything that a call of an operation reads, multiplies and writes; vectors of tokens left out."""
    width, vocabulary, rows = size.width, size.vocabulary, way.chunks(size.tokens)
    if operation in (FORWARD, LOG_PROB):
        for chunk in way.chunks(size.tokens, gradient=False):
            yield from _logits(way, chunk, size, gradient=False)
            yield from _sums(way, chunk, size, written=0)
    if operation == FORWARD:
        return
    yield Step("gradient of hidden: zeros", 0, F32 * size.tokens * width)
    for i, chunk in enumerate(rows):
        yield from _logits(way, chunk, size, gradient=True, known=operation == LOG_PROB)
        yield from _softmax_gradient(way, operation, chunk, size)
        yield from _gradient_products(way, chunk, size, first=i == 0, once=len(rows) == 1)
    yield Step("gradient of hidden: to bf16", F32 * size.tokens * width, B16 * size.tokens * width)
    if len(rows) > 1:
        yield Step("gradient of weight: to bf16", F32 * vocabulary * width, B16 * vocabulary * width)
    if operation != LOG_PROB and way.scales:
        both = B16 * (size.tokens + vocabulary) * width
        yield Step("backward: gradients times that of the loss", both, both)


def floor_steps(gpu: Gpu, operation: str, size: Size) -> Iterator[Step]:
    """The bare products in bf16 with bf16 results, whole."""
    t, d, v = size.tokens, size.width, size.vocabulary
    sides = [(t, v, d)] if operation == FORWARD else [(t, v, d), (t, d, v), (v, d, t)]
    for m, n, k in sides:
        yield Step("product", B16 * (m + n) * k, B16 * m * n, library_product(gpu, m, n, k))


def _logits(way: Way, rows: int, size: Size, *, gradient: bool, known: bool = False) -> Iterator[Step]:
    """hidden @ weight.T of a chunk, into fp32 by the library, into exponentials by a fused product.

    ``known``: nobody reads the sums, which the forward has found.
    """
    width, vocabulary = size.width, size.vocabulary
    read = B16 * (rows + vocabulary) * width
    if way.path == LIBRARY:
        product = library_product(way.gpu, rows, vocabulary, width)
        yield Step("logits", read, F32 * rows * vocabulary, product)
        return
    partials, exponentials = way.partials(rows, vocabulary), B16 * rows * vocabulary * gradient
    if way.path == CUDA:
        product = cuda_product(way.gpu, rows, vocabulary, width)
    else:
        product = triton_product(way.gpu, rows, vocabulary, width, way.plan.tile)
    yield Step("logits", read, exponentials, product)
    if known:
        return
    yield Step("sums of tiles", partials, 0)


def _sums(way: Way, rows: int, size: Size, *, written: int) -> Iterator[Step]:
    """The reading of fp32 logits; a fused product has the sums already."""
    if way.path == LIBRARY:
        yield Step("row kernel", F32 * rows * size.vocabulary, written * rows * size.vocabulary)


def _softmax_gradient(way: Way, operation: str, rows: int, size: Size) -> Iterator[Step]:
    """From logits or exponentials of a chunk to what the gradient products read."""
    logits = rows * size.vocabulary
    if way.path == LIBRARY:
        if operation == WITH_ENTROPY:
            yield from _sums(way, rows, size, written=0)
        yield from _sums(way, rows, size, written=B16)
    elif operation == WITH_ENTROPY:
        yield Step("row kernel", B16 * logits, B16 * logits)


def _gradient_products(way: Way, rows: int, size: Size, *, first: bool, once: bool) -> Iterator[Step]:
    """The two gradient products of a chunk, and the row scales beside them."""
    width, vocabulary = size.width, size.vocabulary
    exponentials, one = B16 * rows * vocabulary, rows * width
    product = library_product(way.gpu, rows, width, vocabulary)
    yield Step("gradient of hidden", exponentials + B16 * vocabulary * width, F32 * one, product)
    yield Step("gradient of hidden: row scales", F32 * one, F32 * one)
    yield Step("hidden: row scales", B16 * one, B16 * one)
    sums = (B16 if once else F32) * vocabulary * width
    product = library_product(way.gpu, vocabulary, width, rows)
    yield Step("gradient of weight", exponentials + B16 * one + (0 if first else sums), sums, product)


def launches(way: Way, operation: str, size: Size) -> int:
    """How many kernels a call launches."""
    column = 2 if way.path == LIBRARY else 1
    call, each = constants.LAUNCHES[operation][0], constants.LAUNCHES[operation][column]
    alone = constants.LAUNCHES[FORWARD][column] * (operation in (FORWARD, LOG_PROB))
    count = len(way.chunks(size.tokens))
    forward = alone * len(way.chunks(size.tokens, gradient=False))
    return call + forward + count * (each - alone) + (count > 1 and operation != FORWARD)


def peak_bytes(way: Way, operation: str, size: Size) -> int:
    """Bytes beyond the inputs at the fullest moment, gradients included; vectors of tokens left out."""
    if operation == FORWARD:
        return _forward_peak(way, size)
    chunks = way.chunks(size.tokens)
    rows, held = max(chunks), min(way.chunk_rows, size.tokens)
    columns = aligned_columns(size.vocabulary)
    buffer = (F32 if way.path == LIBRARY else B16) * held * columns
    partials = 0 if way.path == LIBRARY else way.partials(rows, size.vocabulary)
    one, several = rows * size.width, len(chunks) > 1
    weight = (F32 if several else B16) * size.vocabulary * size.width
    gradients = F32 * size.tokens * size.width + weight
    # dH of the chunk before its row scales, and the scaled hidden states.
    multiplied = buffer + (F32 + B16) * one
    formed = partials + buffer
    if way.path == LIBRARY:
        formed = buffer + B16 * rows * columns
        multiplied += B16 * rows * columns
        if several and operation == POLICY_LOSS:  # that of the chunk before is still held
            formed += B16 * rows * columns
    results = B16 * size.tokens * size.width + (B16 * size.vocabulary * size.width if several else 0)
    return gradients + max(formed, multiplied, results)


def _forward_peak(way: Way, size: Size) -> int:
    """Bytes of a forward alone: raw products of the library, or the sums of tiles that a fused product leaves."""
    if way.path == LIBRARY:
        return F32 * min(way.forward_rows, size.tokens) * aligned_columns(size.vocabulary)
    return way.partials(max(way.chunks(size.tokens, gradient=False)), size.vocabulary)
