"""One call's walk through its tokens, a chunk at a time, and the gradients gathered on the way."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from exgrpo.kernels.inputs import LEFT_OUT, Gradients, Head, Needed
from exgrpo.kernels.torch_chunks import chunking
from exgrpo.kernels.torch_chunks.products import Products
from exgrpo.kernels.torch_chunks.rows import RowOperations
from exgrpo.kernels.torch_chunks.softmax import RowGradient, Statistics, Targets


def positions(taking_part: Tensor) -> Tensor | None:
    """Indices of the True entries of a bool [T], None when all are. Reads their number: waits for the device."""
    index = taking_part.nonzero().squeeze(1)
    return None if index.numel() == taking_part.numel() else index


class Chunk(NamedTuple):
    """Some of the tokens that take part."""

    rows: slice
    """Where they stand among the tokens that were asked for."""
    hidden: Tensor
    """[rows, D]"""
    logits: Tensor
    """[rows, V] raw products, in a buffer that the next chunk overwrites."""
    target: Targets
    temperature: Tensor | None
    """[rows]; None: 1."""

    def select(self, kept: Tensor, logits: Tensor) -> "Chunk":
        """Some rows of the chunk; their logits are passed in."""
        temperature = None if self.temperature is None else self.temperature[kept]
        return Chunk(self.rows, self.hidden[kept], logits, self.target.select(kept), temperature)


class ChunkedHead:
    """A head whose logits exist one chunk of tokens at a time."""

    def __init__(self, head: Head, operations: RowOperations) -> None:
        self.head = head
        self.operations = operations
        self.options = head.options
        self.index = positions(head.target != LEFT_OUT)
        """Positions of the tokens that take part, None when all do."""
        self.count = head.target.numel() if self.index is None else self.index.numel()
        self.shard = head.options.shard
        self.products = Products(head.weight, self.options.operand)
        self.dtype = self.products.compute

    def chunks(self, among: Tensor | None = None) -> Iterator[Chunk]:
        """Chunks of the tokens that take part, or of those ``among`` them (indices into [count])."""
        index = self._positions(among)
        count = self.count if among is None else among.numel()
        step = chunking.chunk_rows(self.shard.largest, self.dtype, self.head.weight.device)
        buffer = self.head.weight.new_empty(min(step, count), self.shard.size, dtype=self.dtype)
        for start, end in chunking.spans(count, step):
            rows = slice(start, end)
            tokens = rows if index is None else index[rows]
            hidden = self.head.hidden[tokens].to(self.options.operand)
            logits = self.products.logits(hidden, buffer[: end - start])
            local, held = self.shard.locate(self.head.target[tokens].unsqueeze(1))
            yield Chunk(rows, hidden, logits, Targets(local, held), self._temperature(tokens, end - start))

    def token_values(self, values: Tensor) -> Tensor:
        """The entries of per-token values [T] that belong to the tokens taking part, in the compute dtype."""
        return (values if self.index is None else values[self.index]).to(self.dtype)

    def all_tokens(self, values: Tensor) -> Tensor:
        """Values of the tokens taking part, [count, ...], spread over all tokens [T, ...], 0 elsewhere."""
        if self.index is None:
            return values
        return spread(values, self.index, self.head.target.numel())

    def _positions(self, among: Tensor | None) -> Tensor | None:
        if among is None or self.index is None:
            return self.index if among is None else among
        return self.index[among]

    def _temperature(self, tokens: Tensor | slice, rows: int) -> Tensor | None:
        temperature = self.options.temperature
        if isinstance(temperature, Tensor):
            return temperature[tokens].to(self.dtype)
        if temperature == 1:
            return None
        return torch.full((rows,), temperature, dtype=self.dtype, device=self.head.weight.device)


class GradientSums:
    """Gradients in the compute dtype, gathered chunk by chunk; those that are not needed are never formed."""

    def __init__(self, head: ChunkedHead, needed: Needed) -> None:
        def zeros(wanted: bool, *shape: int) -> Tensor | None:
            return weight.new_zeros(shape, dtype=head.dtype) if wanted else None

        weight = head.head.weight
        self.head = head
        self.hidden = zeros(needed.hidden, head.count, weight.shape[1])
        self.weight = zeros(needed.weight, *weight.shape)
        self.bias = zeros(needed.bias, weight.shape[0])

    def add(self, chunk: Chunk, statistics: Statistics, upstream: RowGradient, rows: Tensor | slice) -> None:
        """Adds a chunk whose statistics are there. ``rows`` says where its tokens stand in [count]."""
        grad_logits, scale = self.head.operations.gradient(self.head, chunk, statistics, upstream)
        products = self.head.products
        if self.hidden is not None:
            self.hidden[rows] = products.hidden_gradient(grad_logits).mul_(scale.unsqueeze(1))
        if self.weight is not None:
            scaled = chunk.hidden.to(self.head.dtype) * scale.unsqueeze(1)
            products.add_weight_gradient(grad_logits, scaled, self.weight)
        if self.bias is not None:
            self.bias.addmv_(grad_logits.t().to(self.head.dtype), scale)

    def finish(self) -> Gradients:
        """The sums; the gradient of the hidden states [count, D] summed over the vocabulary's shards."""
        hidden = self.hidden
        if hidden is not None:
            (hidden,) = self.head.shard.sum_of(hidden)
        return Gradients(hidden, self.weight, self.bias)


def spread(values: Tensor, index: Tensor, length: int) -> Tensor:
    """Zeros of the given length with ``values`` at ``index``."""
    out = values.new_zeros(length, *values.shape[1:])
    out[index] = values
    return out
