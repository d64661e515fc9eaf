"""DeepSpeed's collectives in a world of one process: copies in its own threads.

Those of gloo run in threads of gloo, which begin to use OpenMP as soon as a tensor is large. OpenMP then counts more
threads than processors, no longer waits for work but sleeps, and every small operation of the process takes twice as
long: that of a step of decoding, for instance.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class _Done:
    """The handle of a collective that is over."""

    def wait(self) -> None:
        """Nothing to wait for."""


def collect_alone() -> None:
    """Let DeepSpeed, whose process group has one rank, do without that group."""
    from deepspeed.comm import comm

    for function in COLLECTIVES:
        setattr(comm.cdb, function.__name__, function)


def all_reduce(tensor: Tensor, *_: Any, **__: Any) -> _Done:
    """A sum or mean over one."""
    return _Done()


def broadcast(tensor: Tensor, *_: Any, **__: Any) -> _Done:
    """From the one to itself."""
    return _Done()


def all_gather_into_tensor(output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> _Done:
    """The whole is the only part."""
    return _copy(output_tensor, input_tensor)


def all_gather(tensor_list: Sequence[Tensor], tensor: Tensor, *_: Any, **__: Any) -> _Done:
    """The same, into a list."""
    return _copy(tensor_list[0], tensor)


def all_gather_coalesced(
    output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], *_: Any, **__: Any
) -> _Done:
    """The same for several tensors."""
    for output, given in zip(output_tensors, input_tensors, strict=True):
        _copy(output, given)
    return _Done()


def reduce_scatter_tensor(output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> _Done:
    """The only part of the sum over one."""
    return _copy(output_tensor, input_tensor)


def reduce_scatter(output: Tensor, input_list: Sequence[Tensor], *_: Any, **__: Any) -> _Done:
    """The same, from a list."""
    return _copy(output, input_list[0])


@torch.no_grad()
def _copy(output: Tensor, given: Tensor) -> _Done:
    if output.data_ptr() != given.data_ptr():
        output.view(-1).copy_(given.reshape(-1))
    return _Done()


COLLECTIVES: tuple[Callable[..., _Done], ...] = (
    all_reduce,
    broadcast,
    all_gather_into_tensor,
    all_gather,
    all_gather_coalesced,
    reduce_scatter_tensor,
    reduce_scatter,
)
