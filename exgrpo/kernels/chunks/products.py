"""The three matrix products of a linear head, with results in float32 (float64 for float64 inputs).

A 16-bit product that rounds its result loses what the log-probability needs, so 16-bit operands are multiplied
into float32 where the device can, and are otherwise converted tile by tile: their products are exact in float32.
A CPU with bfloat16 units multiplies float32 matrices on them if it may round the operands first: exact where they hold
bfloat16 numbers, and several times faster than in float32.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from exgrpo.kernels.chunks import chunking
from exgrpo.kernels.chunks.chunking import Cost
from exgrpo.kernels.inputs import Head, compute_dtype
from exgrpo.kernels.objective import sum_rows


@functools.cache
def multiplies_into_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the device has a product of two ``dtype`` matrices with a float32 result."""
    # On this one GPU, not on "cuda": a thread begins with the first one, and would take memory there.
    probe = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        return torch.mm(probe, probe, out_dtype=torch.float32).dtype == torch.float32
    except (RuntimeError, TypeError):  # no such kernel, a cuBLAS that refuses it, or a torch without the argument
        return False


_MATMUL = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


class _RoundedOperands:
    """While any thread is inside, CPU products of float32 matrices may round their operands to bfloat16.

    PyTorch has one such setting for the whole process: products of other threads are rounded too meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = ""

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = _MATMUL.fp32_precision
                _MATMUL.fp32_precision = "bf16"
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                _MATMUL.fp32_precision = self._before


ROUNDED = _RoundedOperands()

HEADROOM = 2
"""Binary places between the largest upstream gradient and 1, where the range is narrow. A token's gradient times its
hidden state must stay below 2^16, the end of float16, also where its importance ratio is large; beyond it, the gradient
is infinite. It is also divided by Z, most often below 2^9, and keeps all of float16's digits down to 2^-14."""
TILES = 2
"""Of a converted weight, or of its gradient, that exist at once: one is rounded, then widened."""
FARTHEST = 100
"""Binary places of a unit at most: float32 ends at 2^128."""


def row_cost(operand: torch.dtype, width: int, vocabulary: int) -> int:
    """Bytes that the products of a head allocate for each row.

    Its hidden state, gathered, scaled and rounded, two parts of its gradient, and the gradient of its logits once more,
    where the operands are narrower.
    """
    narrow, wide = operand.itemsize, compute_dtype(operand).itemsize
    rounded = vocabulary * narrow if narrow < wide else 0
    return rounded + width * (3 * narrow + 4 * wide)


def unit_of(head: Head, *upstream: Tensor | float | None) -> Tensor | None:
    """Return the factor of the gradients with respect to log-probs and entropies; None: 1.

    Where gradients of a token mean, around 1e-7, are beyond the range of the operands of their products, it is the
    power of two that brings the largest of ``upstream`` near 2^-HEADROOM. All that is made of them has that unit then.
    """
    operand = head.options.operand
    if operand != torch.float16 or not multiplies_into_float32(head.weight.device, operand):
        return None
    zero = head.weight.new_zeros(1, dtype=compute_dtype(operand))
    given = (v if isinstance(v, Tensor) else zero.new_full((), v) for v in upstream if v is not None)
    largest = torch.cat([zero, *(values.to(zero.dtype).flatten() for values in given)]).abs().amax()
    exponent = torch.frexp(largest).exponent.clamp(-FARTHEST, FARTHEST)
    return torch.ldexp(torch.ones_like(largest), -exponent - HEADROOM)


class Products:
    """The products of hidden states with one weight matrix [V, D].

    ``operand`` is the dtype to which hidden states and weight are rounded: their own, or that of autocast. ``memory``
    is that of the call.
    """

    def __init__(self, weight: Tensor, operand: torch.dtype, memory: int | None = None) -> None:
        self.operand = operand
        self.memory = memory
        self.compute = compute_dtype(operand)
        self.mixed = operand != self.compute and multiplies_into_float32(weight.device, operand)
        """Whether 16-bit operands are multiplied into float32."""
        self.copied = self.mixed and weight.dtype != operand
        self.weight = weight.to(operand) if self.copied else weight
        """[V, D], rounded once a call where the operands of every product are 16-bit ones."""
        rounds = self.mixed and weight.dtype == operand and operand != torch.float16
        self.written_once = operand if rounds else self.compute
        """The dtype of a weight gradient that no chunk is added to: the product itself rounds its float32 sums."""
        self.precision = ROUNDED if operand == torch.bfloat16 and weight.device.type == "cpu" else nullcontext()

    def cost(self, vocabulary: int) -> Cost:
        """Return the bytes of the products over ``vocabulary`` entries, a rounded weight included."""
        width = self.weight.shape[1]
        copied = vocabulary * width * self.operand.itemsize if self.copied else 0
        return Cost(copied, row_cost(self.operand, width, vocabulary), TILES * (chunking.TILE_BYTES,))

    def gradient(self, matrix: Tensor) -> "MatrixGradient":
        """Return F, a matrix [rows, V], with its products."""
        return MatrixGradient(self, matrix.to(self.operand) if self.mixed else matrix)

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """hidden [rows, D], rounded already, @ weight.T into ``out`` [rows, V]."""
        if self.mixed:
            return torch.mm(hidden, self.weight.t(), out_dtype=torch.float32, out=out)
        hidden = hidden.to(self.compute)
        for start, end, tile in self._converted(self.compute):
            with self.precision:
                torch.mm(hidden, tile.t(), out=out[:, start:end])
        return out

    def hidden_gradient(self, grad_logits: Tensor) -> Tensor:
        """grad_logits [rows, V], `mixed` in the operands' dtype, @ weight, [rows, D]."""
        if self.mixed:
            return torch.mm(grad_logits, self.weight, out_dtype=torch.float32)
        # With the weight as it is: to convert it to float32 costs more than the product.
        operand = self.operand if self.precision is ROUNDED else self.compute
        total: Tensor | None = None
        for start, end, tile in self._converted(operand):
            part = torch.mm(grad_logits[:, start:end].to(operand), tile)
            total = part.to(self.compute) if total is None else total.add_(part)
        if total is None:
            return grad_logits.new_zeros(grad_logits.shape[0], self.weight.shape[1], dtype=self.compute)
        return total

    def add_hidden_gradient(self, grad_logits: Tensor, total: Tensor) -> None:
        """Add `hidden_gradient` to ``total`` [rows, D]."""
        if self.mixed:
            torch.addmm(total, grad_logits, self.weight, out_dtype=torch.float32, out=total)
        else:
            total.add_(self.hidden_gradient(grad_logits))

    def scaled(self, hidden: Tensor, factor: Tensor) -> Tensor:
        """factor [rows, 1], in the compute dtype, * hidden [rows, D], rounded already; `mixed` rounded once more."""
        return torch.mul(hidden, factor, out=torch.empty_like(hidden)) if self.mixed else torch.mul(hidden, factor)

    def add_weight_gradient(
        self, grad_logits: Tensor, hidden: Tensor, factor: Tensor, total: Tensor, *, fresh: bool
    ) -> None:
        """Add grad_logits.T [V, rows] @ (factor * hidden) [rows, D] to ``total`` [V, D]; ``fresh``: write it there.

        factor is [rows, 1] in the compute dtype, hidden [rows, D] rounded already, ``total`` in the compute dtype; or
        in `written_once`, and then fresh.
        """
        self.add_product(grad_logits.t(), self.scaled(hidden, factor), total, fresh=fresh)

    def add_product(self, columns: Tensor, scaled: Tensor, total: Tensor, *, fresh: bool) -> None:
        """Add columns [V, rows] @ `scaled` hidden states to ``total``; see `add_weight_gradient`."""
        beta = 0.0 if fresh else 1.0  # with 0 what stands in ``total`` is not even read
        if not self.mixed:
            with self.precision:
                total.addmm_(columns, scaled, beta=beta)
        elif total.dtype == self.operand:
            torch.mm(columns, scaled, out=total)
        else:
            torch.addmm(total, columns, scaled, out_dtype=torch.float32, beta=beta, out=total)

    def add_bias_gradient(self, grad_logits: Tensor, factor: Tensor, total: Tensor) -> None:
        """Add grad_logits.T [V, rows] @ factor [rows] to ``total`` [V]."""
        rows, vocabulary = grad_logits.shape
        if grad_logits.is_cpu:  # a library's product adds up in an order that depends on the number of threads
            most = chunking.block_rows(vocabulary * self.compute.itemsize, total.device, self.memory)
            for start, end in chunking.spans(rows, most):
                total += sum_rows(grad_logits[start:end] * factor[start:end].unsqueeze(1))
            return
        for start, end in chunking.spans(vocabulary, chunking.tile_rows(4 * rows, self.memory)):
            total[start:end].addmv_(grad_logits[:, start:end].t().to(self.compute), factor)

    def _converted(self, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
        """The weight rounded to the operand dtype, in ``dtype``: whole where it is so already, else in tiles."""
        vocabulary, width = self.weight.shape
        if self.weight.dtype == self.operand == dtype:
            yield 0, vocabulary, self.weight
            return
        for start, end in chunking.spans(vocabulary, chunking.tile_rows(4 * width, self.memory)):
            yield start, end, self.weight[start:end].to(self.operand).to(dtype)


class LogitGradient(Protocol):
    """The gradient F of a chunk's raw products but for a factor of each row, and its products."""

    def hidden_gradient(self) -> Tensor:
        """Return F @ weight [rows, D]."""

    def add_weight_gradient(self, hidden: Tensor, factor: Tensor, total: Tensor, *, fresh: bool) -> None:
        """Add F.T @ (factor * hidden) to ``total`` [V, D], or write it there; see `Products.add_weight_gradient`."""

    def add_bias_gradient(self, factor: Tensor, total: Tensor) -> None:
        """Add F.T @ factor to ``total`` [V]."""


class MatrixGradient(NamedTuple):
    """A `LogitGradient` whose F is a matrix [rows, V]."""

    products: Products
    values: Tensor

    def hidden_gradient(self) -> Tensor:
        return self.products.hidden_gradient(self.values)

    def add_weight_gradient(self, hidden: Tensor, factor: Tensor, total: Tensor, *, fresh: bool) -> None:
        self.products.add_weight_gradient(self.values, hidden, factor, total, fresh=fresh)

    def add_bias_gradient(self, factor: Tensor, total: Tensor) -> None:
        self.products.add_bias_gradient(self.values, factor, total)
