"""The tokens of a call in chunks, and the sums of their gradients."""

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from exgrpo.kernels import checks
from exgrpo.kernels.chunks import chunking
from exgrpo.kernels.chunks.products import LogitGradient, MatrixGradient, Products
from exgrpo.kernels.inputs import LEFT_OUT, AllowedIds, Gradients, Head, Needed, VocabShard, compute_dtype


class Targets(NamedTuple):
    """The targets of some rows."""

    position: Tensor
    """Local index of each, [rows, 1]."""
    held: Tensor | None
    """Whether this rank holds it, [rows, 1]; None: it holds all."""
    number: Tensor
    """0, 1, 2, ..., [rows] int64."""

    def select(self, rows: Tensor | slice) -> "Targets":
        """Return some of the rows."""
        position = self.position[rows]
        return Targets(position, None if self.held is None else self.held[rows], self.number[: len(position)])

    def local(self) -> Tensor:
        """The index of each target, [rows], -1 where another rank holds it."""
        position = self.position if self.held is None else torch.where(self.held, self.position, -1)
        return position.squeeze(1).contiguous()

    def put(self, values: Tensor, matrix: Tensor) -> None:
        """Write values [rows] at the targets of ``matrix`` [rows, V]."""
        if matrix.shape[1]:
            # Not scatter_: on a CPU that copies a matrix whose rows do not follow each other without a gap.
            where = self.number, self.position.squeeze(1)
            if self.held is not None:
                values = torch.where(self.held.squeeze(1), values, matrix[where])
            matrix[where] = values


class Chunk(NamedTuple):
    """Some of the tokens of a walk."""

    rows: slice
    """Where they stand in the walk."""
    hidden: Tensor
    """[rows, D], rounded to the operands' dtype."""
    target: Targets
    temperature: Tensor | None
    """[rows], contiguous; None: 1."""

    def select(self, kept: Tensor) -> "Chunk":
        """Some rows of the chunk."""
        temperature = None if self.temperature is None else self.temperature[kept]
        return Chunk(self.rows, self.hidden[kept], self.target.select(kept), temperature)

    def tempered(self, values: Tensor) -> Tensor:
        """Values [rows] divided by the temperature."""
        return values if self.temperature is None else values / self.temperature


class ChunkedHead:
    """A head whose logits exist one chunk of tokens at a time.

    The walk goes through the tokens that take part, those with a gradient first. A product's size is the host's
    business: the caller has said how many they are, or the host waits for the device, once a call. What it waits for is
    a sort of T small numbers; tokens that were multiplied for nothing would cost more.
    """

    def __init__(self, head: Head, active: Tensor | None = None, spare: int = 0) -> None:
        self.head = head
        self.options = head.options
        self.shard = head.options.shard
        self.dtype = compute_dtype(self.options.operand)
        self.order, self.count, self.active = order_of(head.target != LEFT_OUT, active, self.options.counts)
        """Positions of the walk's tokens (None: all, in order), how many they are, and how many have a gradient."""
        number = torch.arange(self.count, device=head.target.device)
        self.target = Targets(*self.shard.locate(self.of_tokens(head.target).unsqueeze(1)), number)
        self.spare = spare
        """Bytes that a chunk may have in addition if it is the only one: the gradient of the weight needs no sum."""
        self.at_once: int | None = None
        """Tokens of a chunk, of a `part`: it decides that; None: the memory of the call."""

    @cached_property
    def products(self) -> Products:
        """Products with the weight, of which they may hold a rounded copy: made when they are needed first."""
        return Products(self.head.weight, self.options.operand, self.options.memory)

    @property
    def sets(self) -> AllowedIds:
        """The sets of allowed tokens, of a head that has them."""
        assert self.options.allowed_tokens is not None
        return self.options.allowed_tokens

    def chunks(self, start: int, end: int, step: int, tile: int) -> Iterator[Chunk]:
        """The tokens [start, end) of the walk, at most ``step`` at a time, in whole tiles."""
        for begin, stop in chunking.spans(end - start, step, tile):
            rows = slice(start + begin, start + stop)
            yield Chunk(
                rows,
                self.of_tokens(self.head.hidden, rows).to(self.options.operand),
                self.target.select(rows),
                self.temperature(rows),
            )

    def part(self, entries: slice) -> "ChunkedHead":
        """Return a walk through the active tokens at once, whose head has some entries of the weight alone.

        It is for gradients from known statistics: ranks have nothing to add up then.
        """
        part, weight = copy(self), self.products.weight[entries]
        shard = VocabShard(len(weight), self.shard.offset + entries.start, self.shard.vocabulary, len(weight))
        bias = None if self.head.bias is None else self.head.bias[entries]
        options = replace(self.options, shard=shard)
        part.head = self.head._replace(weight=weight, bias=bias, options=options)
        part.options, part.shard, part.at_once = options, shard, self.active
        part.products = Products(part.head.weight, options.operand, options.memory)
        part.target = Targets(*shard.locate(self.of_tokens(self.head.target).unsqueeze(1)), self.target.number)
        return part

    def temperature(self, rows: slice = slice(None)) -> Tensor | None:
        """Return the temperatures of some tokens of the walk."""
        given = self.options.temperature
        return None if given is None else self.of_tokens(given, rows).to(self.dtype).contiguous()

    def of_tokens(self, values: Tensor, rows: slice = slice(None)) -> Tensor:
        """The entries of per-token values [T, ...] in the order of the walk."""
        return values[rows] if self.order is None else values[self.order[rows]]

    def all_tokens(self, values: Tensor) -> Tensor:
        """Values of the walk, [..., count], spread over all tokens, [..., T], 0 elsewhere; never ``values`` itself."""
        if self.order is None:
            return values.clone()
        out = values.new_zeros(*values.shape[:-1], self.head.target.numel())
        out[..., self.order] = values
        return out


class GradientSums:
    """Gradients in the compute dtype, gathered chunk by chunk; those that are not needed are never formed.

    ``unit``: what all that is added has been multiplied by, see `products.unit_of`. `enter` says whose chunks follow.
    ``weight_grad`` [V, D] in the compute dtype: the gradient of the weight is added to it; None: to none.
    """

    def __init__(self, head: Head, needed: Needed, unit: Tensor | None, weight_grad: Tensor | None) -> None:
        dtype = compute_dtype(head.options.operand)
        weight = head.weight
        self.needed = needed
        self.hidden = weight.new_zeros(head.hidden.shape, dtype=dtype) if needed.hidden else None
        """[T, D]"""
        self.given = weight_grad
        self.weight = weight_grad if needed.weight and unit is None else None
        self.bias = weight.new_zeros(weight.shape[:1], dtype=dtype) if needed.bias else None
        self.unit = unit
        self.begun = False

    def enter(self, head: ChunkedHead, written_once: torch.dtype, *, once: bool) -> None:
        """Begin the chunks of a walk.

        ``once``: there is one chunk at most in all, and the gradient of the weight is written in ``written_once``.
        """
        self.head = head
        if self.needed.weight and self.weight is None:
            weight = head.head.weight
            self.weight = weight.new_empty(weight.shape, dtype=written_once if once else head.dtype)

    def add(self, chunk: Chunk, rows: Tensor | slice, gradient: LogitGradient, scale: Tensor) -> None:
        """Add the gradients of a chunk whose raw products have gradient scale[:, None] * F [rows, V].

        ``rows`` are the places of its tokens in the walk.
        """
        factor = scale.unsqueeze(1)
        if self.hidden is not None:
            found = gradient.hidden_gradient()
            if self.head.order is None and isinstance(rows, slice):
                torch.mul(found, factor, out=self.hidden[rows])
            else:
                self.hidden[rows if self.head.order is None else self.head.order[rows]] = found.mul_(factor)
        if self.weight is not None:
            gradient.add_weight_gradient(chunk.hidden, factor, self.weight, fresh=self._is_fresh)
        if self.bias is not None:
            gradient.add_bias_gradient(scale, self.bias)
        self.begun = True

    def add_slices(self, chunk: Chunk, scale: Tensor, slices: Iterable[tuple[slice, MatrixGradient]]) -> None:
        """Add the gradients of a chunk that is all active tokens, from slices of the vocabulary; see `add`."""
        factor, order = scale.unsqueeze(1), self.head.order
        total = self.hidden
        if total is not None and order is not None:
            total = total.new_zeros(len(factor), total.shape[1])
        scaled = self.head.products.scaled(chunk.hidden, factor)
        for entries, gradient in slices:
            if total is not None:
                gradient.products.add_hidden_gradient(gradient.values, total)
            if self.weight is not None:
                fresh = self.weight is not self.given
                gradient.products.add_product(gradient.values.t(), scaled, self.weight[entries], fresh=fresh)
            if self.bias is not None:
                gradient.add_bias_gradient(scale, self.bias[entries])
            del gradient  # the next one takes its memory
        if total is not None:
            total.mul_(factor)
        if self.hidden is not None and total is not None and order is not None:
            self.hidden[order[: len(total)]] = total
        self.begun = True

    def finish(self) -> Gradients:
        """The sums; the gradient of the hidden states summed over the vocabulary's shards."""
        if self.weight is not None and self._is_fresh:
            self.weight.zero_()
        if self.unit is not None:
            for gathered in (self.hidden, self.weight, self.bias):
                if gathered is not None:
                    gathered.div_(self.unit)
        hidden = self.hidden
        if hidden is not None:
            (hidden,) = self.head.shard.sum_of(hidden)
        if self.given is None or self.weight is None:
            return Gradients(hidden, self.weight, self.bias)
        if self.weight is not self.given:
            self.given.add_(self.weight)
        return Gradients(hidden, None, self.bias)

    @property
    def _is_fresh(self) -> bool:
        return not self.begun and self.weight is not self.given


def positions(taking_part: Tensor) -> Tensor | None:
    """Return the indices of the True entries of a bool [rows], None if all are. Waits for the device."""
    index = taking_part.nonzero().squeeze(1)
    return None if index.numel() == taking_part.numel() else index


def packing(kept: Tensor) -> Tensor:
    """The rows ``kept`` (ascending) in the order in which a matrix is compacted with the fewest moves.

    Of n rows those that stand among the first n stay; the others fill the gaps between them.
    """
    order = torch.arange(kept.numel(), device=kept.device)
    staying = kept < kept.numel()
    gaps = torch.ones_like(staying)
    gaps[kept[staying]] = False
    order[gaps] = kept[~staying]
    return order


def compact(matrix: Tensor, kept: Tensor, step: int) -> Tensor:
    """Move the rows ``kept`` of a matrix to its front, in place, ``step`` at a time, and return them; see `packing`."""
    # Rows move from after the front into it, so nothing is overwritten before it is read.
    gaps = (kept != torch.arange(kept.numel(), device=kept.device)).nonzero().squeeze(1)
    for start, end in chunking.spans(gaps.numel(), step):
        matrix[gaps[start:end]] = matrix[kept[gaps[start:end]]]
    return matrix[: kept.numel()]


def order_of(
    taking_part: Tensor, active: Tensor | None, counts: tuple[int, int] | None
) -> tuple[Tensor | None, int, int]:
    """Order, length and number of active tokens of a walk; ``active`` [T] bool, None: all that take part.

    ``counts``, what the caller has said of both numbers, are checked.
    """
    first = taking_part if active is None else taking_part & active
    found = torch.stack((taking_part, first)).sum(1)
    if counts is None:
        count, with_gradient = found.tolist()
    else:
        count, with_gradient = counts[0], counts[0 if active is None else 1]
        good = torch.stack((found[0] == count, found[1] <= with_gradient))
        checks.values("counts", found, good, "{} targets that are not left out and at most {} with a gradient", *counts)
    if count == len(taking_part) and with_gradient in (0, count):
        return None, count, with_gradient
    place = 2 - taking_part.to(torch.int8) - first.to(torch.int8)
    return place.argsort(stable=True)[:count], count, with_gradient
