"""Which derivatives the functions have: the first ones, in reverse mode, by torch.autograd. Any other is refused.

The operators form their gradients by hand, and PyTorch takes for constant what it finds no rule for: without these
checks derivatives in forward mode, and second ones, would be zero without a word. The functions of
:mod:`exgrpo.kernels.reference` are plain PyTorch and have all of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

FORWARD_MODE = "forward-mode derivatives (forward_ad, jvp, jacfwd, hessian)"
TRANSFORMS = "derivatives by torch.func (grad, vjp, jacrev), only by torch.autograd"
SECOND = "second derivatives: call backward or torch.autograd.grad without create_graph=True"


def check_reverse_mode(function: str, *tensors: Tensor | None) -> None:
    """Check that nothing but torch.autograd differentiates ``function`` in these arguments.

    Raises:
        NotImplementedError: one has a tangent of forward mode, or is differentiated by a transform of torch.func.
    """
    remedy = f"; use exgrpo.kernels.reference.{function}, or detach what is constant"
    _refuse(f"{function} has no {FORWARD_MODE}{remedy}", f"{function} has no {TRANSFORMS}{remedy}", tensors)


def check_constant(function: str, *tensors: object) -> None:
    """Check that nothing differentiates ``function``, which has no derivatives; torch.autograd does so itself.

    Raises:
        NotImplementedError: as by :func:`check_reverse_mode`.
    """
    message = f"{function} has no derivatives; detach its arguments"
    _refuse(message, message, tensors)


def check_first(function: str) -> None:
    """Check, in a backward, that the derivatives of its gradients are not wanted.

    Raises:
        NotImplementedError: it was called with ``create_graph=True``.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(f"{function} has no {SECOND}, or use exgrpo.kernels.reference.{function}")


def added_to(total: Tensor | None, tensor: Tensor) -> Tensor:
    """Return the tensor itself, whose gradient is added to ``total``, if there is one, and reaches no other."""
    return tensor if total is None else _Added.apply(tensor, total)


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, total: Tensor) -> Tensor:
        ctx.total = total
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.total.add_(gradient)
        return None, None


def requires_grad(tensor: Tensor | None) -> bool:
    """True if the gradient of a tensor is wanted, also of one that torch.vmap has wrapped."""
    if tensor is None or not torch._C._are_functorch_transforms_active():
        return tensor is not None and tensor.requires_grad
    return any(level.requires_grad for level in _levels(tensor))


def _refuse(forward_mode: str, transforms: str, arguments: tuple[object, ...]) -> None:
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        _refuse_differentiated(forward_mode, transforms, tensors)


@torch._disable_dynamo  # a compiler would not see what is asked for here: it leaves such calls uncompiled
def _refuse_differentiated(forward_mode: str, transforms: str, tensors: Sequence[Tensor]) -> None:
    if tensors and forward_ad._current_level >= 0:
        _NoForwardMode.apply(forward_mode, *tensors)
    tracked = torch._C._functorch.is_gradtrackingtensor
    levels = (level for tensor in tensors for level in _levels(tensor))
    if torch.is_grad_enabled() and any(level.requires_grad and tracked(level) for level in levels):
        raise NotImplementedError(transforms)


class _NoForwardMode(torch.autograd.Function):
    """Computes nothing; forward mode comes here for a rule, through all transforms that it is nested in."""

    generate_vmap_rule = True

    @staticmethod
    def forward(message: str, *tensors: Tensor) -> Tensor:
        return tensors[0].new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.message = inputs[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        raise NotImplementedError(ctx.message)


def _levels(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, and those that transforms of torch.func have wrapped in it."""
    yield tensor
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
        yield tensor
