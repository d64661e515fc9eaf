"""The passes over a chunk of logits as Triton kernels: see `row_kernels`."""

from dataclasses import replace

import torch
from torch import Tensor

from exgrpo.kernels import debug
from exgrpo.kernels.chunks.head import Chunk, ChunkedHead
from exgrpo.kernels.chunks.passes import ByFormulas
from exgrpo.kernels.chunks.softmax import Factors, Statistics, Sums
from exgrpo.kernels.triton_chunks import triton_tokens
from exgrpo.kernels.triton_chunks.launch import Plan, plan
from exgrpo.kernels.triton_chunks.row_kernels import gradient_kernel, statistics_kernel

ALIGNED = 16
"""Entries that divide the stride between a matrix's rows, whatever V is: loads are wide then."""


def plan_of(head: ChunkedHead) -> Plan:
    """What the launch table has for a head, the fused product only where it can be."""
    weight, operand = head.head.weight, head.options.operand
    chosen = plan(weight.device, operand, weight.shape[1], head.shard.largest)
    # The exponentials of a capped logit do not tell how steep the cap is there.
    fused = chosen.fused and head.options.softcap is None and weight.dtype == operand
    if debug.wanted():
        debug.say(f"{operand} head of width {weight.shape[1]}: {'its own' if fused else 'the library'} product")
    return replace(chosen, fused=fused)


class TritonPasses(ByFormulas):
    """Sums in one reading of the raw products; F in a second one, or during the first where it can be.

    F goes into a matrix of the operands' dtype where the gradient products take that, else over the products.
    """

    formulas = triton_tokens
    compacts = False
    """To know how many rows of a chunk have a gradient, the host would have to wait for the device."""

    def __init__(self, head: ChunkedHead, chosen: Plan) -> None:
        self.head = head
        self.plan = chosen
        self.products = head.products
        self.bias = head.head.bias
        self.softcap = head.options.softcap
        self._buffer: Tensor | None = None
        self._logits = head.head.weight.new_empty(0)
        self._written: Tensor | None = None

    def chunk_rows(self) -> int:
        """See `Passes`."""
        return self.plan.chunk_rows

    def sums(self, chunk: Chunk, *, gradient_follows: bool, with_entropy: bool = False) -> Sums:
        """See `Passes`."""
        logits, shard = self._products(chunk), self.head.shard
        write = gradient_follows and not with_entropy and self.softcap is None and self.head.products.mixed_gradients
        self._written = padded(len(logits), logits.shape[1], logits, self.head.options.operand) if write else None
        given = self._global_anchor() if shard.group_name else None
        anchor, gap, rest, moment = logits.new_empty(4, logits.shape[0])
        if logits.shape[1]:
            with torch.cuda.device_of(logits):
                statistics_kernel[(logits.shape[0],)](
                    logits,
                    _or(self.bias, logits).contiguous(),
                    _or(self._written, logits),
                    chunk.target.local(),
                    self._temperature(chunk),
                    _or(given, anchor),
                    anchor,
                    gap,
                    rest,
                    moment,
                    self._cap(),
                    logits.shape[1],
                    logits.stride(0),
                    HAS_BIAS=self.bias is not None,
                    HAS_SOFTCAP=self.softcap is not None,
                    GIVEN=given is not None,
                    WRITE=write,
                    BLOCK=self.plan.rows.block,
                    num_warps=self.plan.rows.warps,
                )
        else:
            rest, moment, gap = rest.zero_(), moment.zero_(), gap.fill_(-torch.inf)
        if given is not None:
            anchor = given
            (gap,) = shard.largest_of(gap)  # -inf where the target is not held
            rest, moment = shard.sum_of(rest, moment)
        return Sums(anchor, gap, rest, moment)

    def recall(self, chunk: Chunk, statistics: Statistics) -> None:
        """See `Passes`: `gradient` reads the products themselves."""
        self._products(chunk)
        self._written = None

    def select(self, kept: Tensor) -> None:
        """See `Passes`."""
        raise NotImplementedError("it does not compact")

    def gradient(self, chunk: Chunk, statistics: Statistics, factors: Factors) -> Tensor:
        """See `Passes`."""
        if factors.upstream is None and self._written is not None:
            chunk.target.put(factors.at_target.to(self._written.dtype), self._written)
            return self._written
        logits, upstream = self._logits, factors.upstream
        narrow = self.head.products.mixed_gradients
        out = padded(len(logits), logits.shape[1], logits, self.head.options.operand) if narrow else logits
        if not logits.shape[1]:
            return out
        with torch.cuda.device_of(logits):
            gradient_kernel[(logits.shape[0],)](
                logits,
                _or(self.bias, logits).contiguous(),
                out,
                chunk.target.local(),
                self._temperature(chunk),
                statistics.anchor.contiguous(),
                statistics.mean.contiguous(),
                factors.at_target,
                factors.at_target if upstream is None else upstream.log_prob.contiguous(),
                factors.at_target if upstream is None else _or(upstream.entropy, factors.at_target).contiguous(),
                self._cap(),
                logits.shape[1],
                logits.stride(0),
                HAS_BIAS=self.bias is not None,
                HAS_SOFTCAP=self.softcap is not None,
                PLAIN=upstream is None,
                BLOCK=self.plan.rows.block,
                num_warps=self.plan.rows.warps,
            )
        return out

    def _products(self, chunk: Chunk) -> Tensor:
        """A chunk's raw products."""
        self._logits = self.head.products.logits(chunk.hidden, self._memory(chunk, self.head.dtype))
        return self._logits

    def _memory(self, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        """[rows, V] that the next chunk overwrites."""
        if self._buffer is None:
            rows = min(self.chunk_rows(), self.head.count)
            self._buffer = padded(rows, self.head.shard.size, chunk.hidden, dtype)
        return self._buffer[: len(chunk.hidden)]

    def _global_anchor(self) -> Tensor:
        """The largest logit [rows] over all shards: an anchor that no row has to be read again for."""
        logits = self._logits
        if logits.shape[1]:
            largest = (logits if self.bias is None else logits + self.bias).amax(1)
        else:
            largest = logits.new_full((logits.shape[0],), -torch.inf)
        if self.softcap is not None:
            largest = self.softcap * torch.tanh(largest / self.softcap)
        return self.head.shard.largest_of(largest)[0]

    def _temperature(self, chunk: Chunk) -> Tensor:
        return self._logits.new_ones(len(chunk.hidden)) if chunk.temperature is None else chunk.temperature.contiguous()

    def _cap(self) -> Tensor:
        # By a tensor: a number would be rounded to float32 on its way.
        return self._logits.new_full((1,), self.softcap or 1.0)


def padded(rows: int, columns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised matrix whose row stride ALIGNED divides."""
    return like.new_empty(rows, -(-columns // ALIGNED) * ALIGNED, dtype=dtype)[:, :columns]


def _or(tensor: Tensor | None, otherwise: Tensor) -> Tensor:
    """A pointer for an argument that the kernel does not use."""
    return otherwise if tensor is None else tensor
