"""The passes over a chunk of logits as Triton kernels: see `row_kernels`."""

from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exgrpo.kernels import backend_choice
from exgrpo.kernels.chunks import chunking
from exgrpo.kernels.chunks.chunking import Cost
from exgrpo.kernels.chunks.head import Chunk, ChunkedHead
from exgrpo.kernels.chunks.passes import ByFormulas, columns_within
from exgrpo.kernels.chunks.products import MatrixGradient
from exgrpo.kernels.chunks.softmax import Factors, PolicyRows, RowTerms, Statistics, Sums
from exgrpo.kernels.inputs import PolicyTokens
from exgrpo.kernels.triton_chunks import triton_tokens
from exgrpo.kernels.triton_chunks.fused_product import tile_with_bias
from exgrpo.kernels.triton_chunks.launch import LaunchPlan, multiprocessors, plan
from exgrpo.kernels.triton_chunks.row_kernels import (
    LARGEST_SUM,
    gradient_kernel,
    listed_largest_kernel,
    statistics_kernel,
)

ALIGNED = 16
"""Entries that divide the stride between a matrix's rows, whatever V is: loads are wide then."""


def plan_of(head: ChunkedHead) -> LaunchPlan:
    """Return the launch plan of a head, fused only where the product can be."""
    weight, operand = head.products.weight, head.options.operand
    chosen = plan(weight.device, operand, weight.shape[1], head.shard.largest)
    # The exponentials of a capped logit do not tell how steep the cap is there.
    fused = chosen.fused and head.options.softcap is None and weight.dtype == operand
    backend_choice.say_product(operand, weight.shape[1], fused)
    biased = head.head.bias is not None
    tile = tile_with_bias(chosen.tile, backend_choice.architecture(weight.device)) if biased else chosen.tile
    return replace(chosen, fused=fused, tile=tile)


def rows_of(
    plan: LaunchPlan, memory: int | None, tokens: int, width: int, cost: Cost, processors: int, spare: int = 0
) -> int:
    """Tokens of a chunk: all, or whole tiles and whole waves of them.

    Args:
        memory: of the call; None: the plan's.
        processors: of the device.
        spare: bytes in addition if there is one chunk.
    """
    least = chunking.TILE_ROWS
    given = plan.memory if memory is None else memory
    rows = chunking.rows_within(given, tokens, cost, least, strict=memory is not None)
    if max(rows, chunking.rows_within(given + spare, tokens, cost, least, strict=False)) >= tokens:
        return max(rows, tokens)
    return chunking.full_waves(rows, width, processors)


class Matrices(NamedTuple):
    """Matrices of a chunk between its forward and its gradient."""

    matrix: Tensor | None
    """[rows, V]: raw products, or exponentials; None if no gradient follows a product that writes none."""
    gradient: Tensor | None
    """F [rows, V], but for the targets until `policy` is called; None: `chunk_gradient` makes it."""


class TritonPasses(ByFormulas):
    """Passes with the sums in one reading of the raw products; F in a second one, or during the first where it can be.

    F goes into a matrix of the operands' dtype where the gradient products take that, else over the products.
    """

    formulas = triton_tokens
    tile = chunking.TILE_ROWS
    block: int | None = None
    """To know how many rows of a chunk have a gradient, the host would have to wait for the device."""

    def __init__(self, head: ChunkedHead, chosen: LaunchPlan) -> None:
        self.head = head
        self.plan = chosen
        self.products = head.products
        bias = head.head.bias
        self.bias = None if bias is None else bias.contiguous()
        self.softcap = cap = head.options.softcap
        # By a tensor: a number would be rounded to float32 on its way.
        self._cap = None if cap is None else head.head.weight.new_full((1,), cap, dtype=head.dtype)
        self.written_once = self.products.written_once

    @cached_property
    def buffer(self) -> Tensor:
        """Scratch memory of a chunk, [rows, V]."""
        return self._scratch(self.head.dtype)

    @cached_property
    def narrow(self) -> Tensor:
        """Scratch memory of F in the operands' dtype, [rows, V]."""
        return self._scratch(self.head.options.operand)

    def _scratch(self, dtype: torch.dtype) -> Tensor:
        rows, columns = min(self.chunk_rows(gradient_follows=True), self.head.count), self.head.shard.size
        return self.head.head.hidden.new_empty(rows, aligned_columns(columns), dtype=dtype)[:, :columns]

    def chunk_rows(self, *, gradient_follows: bool) -> int:
        # A bound that is too small for the backward is refused before the forward, which may need less.
        if self.head.at_once is not None:
            return self.head.at_once
        weight, tokens, memory = self.head.head.weight, self.head.head.target.numel(), self.head.options.memory
        vocabulary = self.head.shard.largest
        if memory is not None:
            chunking.rows_within(memory, tokens, self.cost(vocabulary), chunking.TILE_ROWS)
        cost = self.cost(vocabulary, gradient_follows)
        # A gradient that one chunk writes rounded has no sum.
        spare = self.head.spare if gradient_follows and self.written_once != self.head.dtype else 0
        return rows_of(self.plan, memory, tokens, weight.shape[1], cost, multiprocessors(weight.device), spare)

    def slice_columns(self) -> int:
        memory = self.head.options.memory
        return columns_within(self.head, self.plan.memory if memory is None else memory, self.cost)

    def cost(self, vocabulary: int, gradient_follows: bool = True) -> Cost:
        """Return the bytes of a walk with these passes: the raw products, and what `Products` rounds."""
        bias = self.head.head.bias
        products = self.products.cost(vocabulary)
        fixed = products.fixed + (0 if bias is None else 8 * vocabulary)
        row = products.row + aligned_columns(vocabulary) * self.head.dtype.itemsize + chunking.ROW_BYTES
        scratch = products.scratch if bias is not None or not self.products.mixed else ()
        return Cost(fixed, row, scratch)

    def chunk_forward(
        self, chunk: Chunk, *, gradient_follows: bool, with_entropy: bool = False
    ) -> tuple[Sums, Matrices]:
        logits = self.products.logits(chunk.hidden, self.buffer[: len(chunk.hidden)])
        write = gradient_follows and not with_entropy and self.softcap is None and self.products.mixed
        held = Matrices(logits, self.narrow[: len(logits)] if write else None)
        if self.head.shard.group_name:
            return self._sums_of_shards(chunk, held), held
        return self._statistics(chunk, held), held

    def _sums_of_shards(self, chunk: Chunk, held: Matrices) -> Sums:
        # Anchored as one rank's are, but by what all ranks know: no rank reads a row again that no rank has to.
        shard = self.head.shard
        (at_target,) = shard.largest_of(self._target_logits(chunk, held))
        own = self._statistics(chunk, held, at_target)
        (rest,) = shard.sum_of(own.rest)
        far = ~(rest <= LARGEST_SUM.value)
        (largest,) = shard.largest_of(self._largest(held, far))
        anchor = torch.where(far, largest, at_target)
        again = self._statistics(chunk, held, anchor, far)
        found = torch.stack((again.rest, again.moment)), torch.stack((own.rest, own.moment))
        return Sums(anchor, chunk.tempered(at_target - anchor), *shard.sum_of(*torch.where(far, *found)))

    def _statistics(
        self, chunk: Chunk, held: Matrices, given: Tensor | None = None, listed: Tensor | None = None
    ) -> Sums:
        """Return the sums of this rank's part for all rows or the listed ones, from given anchors or its own."""
        logits, written = held.matrix, held.gradient
        assert logits is not None
        anchor, gap, rest, moment = logits.new_empty(4, logits.shape[0])
        if not logits.shape[1]:
            return Sums(anchor, gap.fill_(-torch.inf), rest.zero_(), moment.zero_())
        with torch.cuda.device_of(logits):
            statistics_kernel[(logits.shape[0],)](
                logits,
                self.bias,
                written,
                chunk.target.local(),
                chunk.temperature,
                given,
                listed,
                anchor,
                gap,
                rest,
                moment,
                self._cap,
                logits.shape[1],
                logits.stride(0),
                **self._compiled(),
            )
        return Sums(anchor, gap, rest, moment)

    def policy(
        self, sums: Sums, chunk: Chunk, held: Matrices, tokens: PolicyTokens, terms: RowTerms, out: Tensor
    ) -> PolicyRows:
        # F, where the pass for the sums has left it, is completed at the targets.
        matrix = held.gradient
        target = None if matrix is None else chunk.target.local()
        return triton_tokens.policy_rows(sums, tokens, terms, chunk.temperature, out, matrix, target)

    def chunk_gradient(
        self, chunk: Chunk, held: Matrices | None, statistics: Statistics, factors: Factors
    ) -> MatrixGradient:
        if held is not None and held.gradient is not None:
            return self.products.gradient(held.gradient)
        logits = None if held is None else held.matrix
        if logits is None:
            logits = self.products.logits(chunk.hidden, self.buffer[: len(chunk.hidden)])
        out, upstream = self.narrow[: len(logits)] if self.products.mixed else logits, factors.upstream
        if logits.shape[1]:
            with torch.cuda.device_of(logits):
                gradient_kernel[(logits.shape[0],)](
                    logits,
                    self.bias,
                    out,
                    chunk.target.local(),
                    chunk.temperature,
                    statistics.anchor.contiguous(),
                    statistics.mean.contiguous(),
                    factors.at_target,
                    *((None, None) if upstream is None else (one.contiguous() for one in upstream)),
                    self._cap,
                    logits.shape[1],
                    logits.stride(0),
                    **self._compiled(),
                )
        return self.products.gradient(out)

    def _target_logits(self, chunk: Chunk, matrices: Matrices) -> Tensor:
        """Return the target's logit [rows]; -inf where this rank does not hold it."""
        logits, (position, held, _) = matrices.matrix, chunk.target
        assert logits is not None
        if not logits.shape[1] or held is None:
            return logits.new_full((len(position),), -torch.inf)
        found = logits.gather(1, position)
        if self.bias is not None:
            found = found + self.bias.to(found.dtype)[position]
        if self.softcap is not None:
            found = self.softcap * torch.tanh(found / self.softcap)
        return torch.where(held, found, -torch.inf).squeeze(1)

    def _largest(self, held: Matrices, listed: Tensor) -> Tensor:
        """Return the largest logits [rows] of the listed rows, -inf for others."""
        logits = held.matrix
        assert logits is not None
        largest = logits.new_full((len(logits),), -torch.inf)
        if logits.shape[1]:
            with torch.cuda.device_of(logits):
                listed_largest_kernel[(len(logits),)](
                    logits,
                    self.bias,
                    listed,
                    largest,
                    self._cap,
                    logits.shape[1],
                    logits.stride(0),
                    **self._compiled(),
                )
        return largest

    def _compiled(self) -> dict[str, Any]:
        return {"BLOCK": self.plan.rows.block, "num_warps": self.plan.rows.warps}


def aligned_columns(columns: int) -> int:
    """Return the next multiple of ALIGNED."""
    return -(-columns // ALIGNED) * ALIGNED
