"""The passes over a chunk of logits as Triton kernels, see `kernels`."""

import torch
from torch import Tensor

from exgrpo.kernels.torch_chunks.head import Chunk, ChunkedHead
from exgrpo.kernels.torch_chunks.softmax import RowGradient, Statistics, finished, row_factors
from exgrpo.kernels.triton_chunks.kernels import gradient_kernel, statistics_kernel
from exgrpo.kernels.triton_chunks.launch import launch


class TritonRows:
    """Statistics in one reading of the raw products; F in a second one, or during the first where it can be.

    F goes into a matrix of the operands' dtype where the gradient products take that, else over the products.
    """

    compacts = False
    """To know how many rows of a chunk have a gradient, the host would have to wait for the device."""

    def __init__(self) -> None:
        self._written: Tensor | None = None

    def statistics(self, head: ChunkedHead, chunk: Chunk, *, gradient_follows: bool) -> Statistics:
        """See `RowOperations`."""
        logits = chunk.logits
        softcap, shard = head.options.softcap, head.shard
        write = gradient_follows and softcap is None and head.products.mixed_gradients
        self._written = _like(logits, head.options.operand) if write else None
        given = _global_anchor(head, chunk) if shard.group is not None else None
        anchor, gap, rest, moment = logits.new_empty(4, logits.shape[0])
        if logits.shape[1]:
            chosen = launch(logits.device, logits.shape[1])
            with torch.cuda.device_of(logits):
                statistics_kernel[(logits.shape[0],)](
                    logits,
                    _bias(head, logits),
                    _or(self._written, logits),
                    _local_target(chunk),
                    _temperature(chunk),
                    _or(given, anchor),
                    anchor,
                    gap,
                    rest,
                    moment,
                    _cap(head, logits),
                    logits.shape[1],
                    logits.stride(0),
                    HAS_BIAS=head.head.bias is not None,
                    HAS_SOFTCAP=softcap is not None,
                    GIVEN=given is not None,
                    WRITE=write,
                    BLOCK=chosen.block,
                    num_warps=chosen.warps,
                )
        else:
            rest, moment, gap = rest.zero_(), moment.zero_(), gap.fill_(-torch.inf)
        if given is not None:
            anchor = given
            (gap,) = shard.largest_of(gap)  # -inf where the target is not held
            rest, moment = shard.sum_of(rest, moment)
        return finished(anchor, gap, rest, moment)

    def recall(self, head: ChunkedHead, chunk: Chunk, statistics: Statistics) -> None:
        """See `RowOperations`: `gradient` reads the products themselves."""
        self._written = None

    def gradient(
        self, head: ChunkedHead, chunk: Chunk, statistics: Statistics, upstream: RowGradient
    ) -> tuple[Tensor, Tensor]:
        """See `RowOperations`."""
        scale, at_target, entropy = row_factors(chunk.temperature, head.options.softcap, statistics, upstream)
        if entropy is None and self._written is not None:
            chunk.target.put(at_target.to(self._written.dtype), self._written)
            return self._written, scale
        return self._form(head, chunk, statistics, RowGradient(upstream.log_prob, entropy), at_target), scale

    def _form(
        self, head: ChunkedHead, chunk: Chunk, statistics: Statistics, upstream: RowGradient, at_target: Tensor
    ) -> Tensor:
        logits, softcap = chunk.logits, head.options.softcap
        out = _like(logits, head.options.operand) if head.products.mixed_gradients else logits
        if not logits.shape[1]:
            return out
        chosen = launch(logits.device, logits.shape[1])
        with torch.cuda.device_of(logits):
            gradient_kernel[(logits.shape[0],)](
                logits,
                _bias(head, logits),
                out,
                _local_target(chunk),
                _temperature(chunk),
                statistics.anchor.contiguous(),
                statistics.mean.contiguous(),
                at_target,
                upstream.log_prob.contiguous(),
                _or(upstream.entropy, at_target).contiguous(),
                _cap(head, logits),
                logits.shape[1],
                logits.stride(0),
                HAS_BIAS=head.head.bias is not None,
                HAS_SOFTCAP=softcap is not None,
                PLAIN=upstream.entropy is None,
                BLOCK=chosen.block,
                num_warps=chosen.warps,
            )
        return out


def _global_anchor(head: ChunkedHead, chunk: Chunk) -> Tensor:
    """The largest logit [rows] over all shards: an anchor that no row has to be read again for."""
    logits = chunk.logits
    if logits.shape[1]:
        largest = logits if head.head.bias is None else logits + head.head.bias
        largest = largest.amax(1)
    else:
        largest = logits.new_full((logits.shape[0],), -torch.inf)
    if head.options.softcap is not None:
        largest = head.options.softcap * torch.tanh(largest / head.options.softcap)
    return head.shard.largest_of(largest)[0]


def _local_target(chunk: Chunk) -> Tensor:
    position = chunk.target.position.squeeze(1)
    if chunk.target.held is not None:
        position = torch.where(chunk.target.held.squeeze(1), position, -1)
    return position.contiguous()


def _temperature(chunk: Chunk) -> Tensor:
    return chunk.logits.new_ones(chunk.logits.shape[0]) if chunk.temperature is None else chunk.temperature.contiguous()


def _bias(head: ChunkedHead, logits: Tensor) -> Tensor:
    return _or(None if head.head.bias is None else head.head.bias.contiguous(), logits)


def _cap(head: ChunkedHead, logits: Tensor) -> Tensor:
    # By a tensor: a number would be rounded to float32 on its way.
    return logits.new_full((1,), head.options.softcap or 1.0)


def _like(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(logits, dtype=dtype)


def _or(tensor: Tensor | None, otherwise: Tensor) -> Tensor:
    """A pointer for an argument that the kernel does not use."""
    return otherwise if tensor is None else tensor
