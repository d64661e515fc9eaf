"""`torch.ops.exgrpo.scale_gradient`: gradients that a forward has formed, times what the backward brings."""

import torch
from torch import Tensor
from torch.library import custom_op

from exgrpo.kernels.chunks import chunking

SCALED_AT_ONCE = 4 << 20
"""Entries of a gradient that a CPU scales before the next ones: fewer would have threads wait for each other often."""


@custom_op("exgrpo::scale_gradient", mutates_args=())
def scale_gradient(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient times ``factor``, a tensor without dimensions, in ``dtype``: one reading and one writing."""
    result = torch.empty_like(gradient, dtype=dtype, memory_format=torch.contiguous_format)
    if gradient.device.type != "cpu":
        return torch.mul(gradient, factor, out=result)
    # A CPU has the products in the gradient's dtype first: those of a block take no new memory.
    source, written = gradient.view(-1), result.view(-1)
    for start, end in chunking.spans(source.numel(), SCALED_AT_ONCE):
        torch.mul(source[start:end], factor, out=written[start:end])
    return result


@scale_gradient.register_fake
def _(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype, memory_format=torch.contiguous_format)


def scale_in_place(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same in the memory of ``gradient``, unless another backward of the graph will want it."""
    real = type(gradient) is Tensor  # a compiler traces with others, and reuses memory itself
    if real and gradient.dtype == dtype and not torch._C._autograd._get_current_graph_task_keep_graph():
        return gradient.mul_(factor)
    return scale_gradient(gradient, factor, dtype)
