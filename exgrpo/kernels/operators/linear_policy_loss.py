"""`torch.ops.exgrpo.linear_policy_loss`: the loss, and its gradients with it; the backward scales them.

It does so by `torch.ops.exgrpo.scale_gradient`, or in place.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from exgrpo.kernels import checks, derivatives, dispatch
from exgrpo.kernels.chunks import chunking, walks
from exgrpo.kernels.inputs import Head, Needed, PolicyTerms, compute_dtype
from exgrpo.kernels.operators.schema import (
    HEAD,
    SURROGATE,
    TOKENS,
    WAITS,
    Schema,
    flat_head,
    head_of,
    terms_of,
    without_autocast,
)

SCHEMA = Schema(
    f"{HEAD}, {TOKENS}, {SURROGATE}, float entropy_coef, Tensor? normalizer, bool[] needed, str backend",
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
)
"""``needed``: whether gradients of hidden, weight and bias are."""
SCALED_AT_ONCE = 4 << 20
"""Entries of a gradient that a CPU scales before the next ones: fewer would have threads wait for each other often."""


def linear_policy_loss(
    head: Head, terms: PolicyTerms, backend: str, weight_grad: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The loss; and log-probability, entropy, ratio and clipped of each token, detached, [4, T].

    The gradient of the weight is added to ``weight_grad`` at once, if there is one.
    """
    tensors = (head.hidden, head.weight, head.bias)
    derivatives.check_reverse_mode("linear_policy_loss", *tensors)
    enabled = torch.is_grad_enabled()
    needed = [enabled and derivatives.requires_grad(tensor) for tensor in tensors]
    numbers = (*terms.surrogate, terms.entropy_coef, terms.normalizer)
    arguments = (*flat_head(head), *terms.tokens, *numbers, needed, backend)
    if weight_grad is None or not needed[1]:
        loss, per_token, *_ = forward(*SCHEMA.traced(arguments))
        return loss, per_token
    with torch.no_grad():
        loss, per_token, *held = _results(SCHEMA.named((*arguments, None)), weight_grad)
    return _Differentiated.apply(loss, *tensors, *held), per_token


@custom_op("exgrpo::linear_policy_loss", mutates_args=(), schema=SCHEMA.text, tags=WAITS)
def forward(*arguments: Any) -> tuple[Tensor, ...]:
    """The loss, the per-token results [4, T], and the gradients; empty ones where they are not needed."""
    return _results(SCHEMA.given(arguments))


def _results(given: Mapping[str, Any], weight_grad: Tensor | None = None) -> tuple[Tensor, ...]:
    head, terms, needed = head_of(given), terms_of(given), Needed(*given["needed"])
    with without_autocast(head.hidden):
        taken = dispatch.take_for_head(given["backend"], "linear_policy_loss", head)
        results = walks.policy_loss_forward(head, terms, needed, taken, weight_grad)
    loss, per_token, gradients = results
    pairs = zip(gradients, (head.hidden, head.weight, head.bias), strict=True)
    held = (
        loss.new_empty(0) if gradient is None or tensor is None else gradient.to(_held_dtype(tensor))
        for gradient, tensor in pairs
    )
    return loss, per_token, *held


def _held_dtype(tensor: Tensor) -> torch.dtype:
    # Where a gradient is scaled in place, that of the tensor. Not float16, which has no range for the gradients of a
    # token mean before a scaler has multiplied them.
    return tensor.dtype if tensor.dtype == torch.bfloat16 else compute_dtype(tensor.dtype)


@forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    given = SCHEMA.named(arguments)
    head = head_of(given)
    loss = head.hidden.new_empty((), dtype=compute_dtype(head.options.operand))
    held = (
        loss.new_empty(tensor.shape, dtype=_held_dtype(tensor)) if want and tensor is not None else loss.new_empty(0)
        for tensor, want in zip((head.hidden, head.weight, head.bias), given["needed"], strict=True)
    )
    return loss, loss.new_empty(4, *head.target.shape), *held


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


def scale_in_place(gradient: Tensor, factor: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """Scale a gradient in its own memory, unless another backward of the graph will need it."""
    # A compiler traces with other tensors, and reuses memory itself; those of the meta device have none.
    real = type(gradient) is Tensor and not gradient.is_meta
    if real and gradient.dtype == dtype and not torch._C._autograd._get_current_graph_task_keep_graph():
        dispatch.take_for_values(backend, "the backward of linear_policy_loss", gradient).scale(gradient, factor)
        return gradient
    return scale_gradient(gradient, factor, dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    given = SCHEMA.named(inputs)
    _, per_token, *held = output
    needed = zip(Needed._fields, held, given["needed"], strict=True)
    kept = {name: gradient for name, gradient, want in needed if want}
    ctx.save_for_backward(*kept.values())
    ctx.dtypes = {name: given[name].dtype for name in kept}
    ctx.backend = given["backend"]
    ctx.mark_non_differentiable(per_token, *held)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return SCHEMA.gradients({})
    derivatives.check_first("linear_policy_loss")
    pairs = zip(ctx.saved_tensors, ctx.dtypes.items(), strict=True)
    # In place: nothing but this graph has the gradients.
    scaled = {name: scale_in_place(one, grad_loss, dtype, ctx.backend) for one, (name, dtype) in pairs}
    return SCHEMA.gradients(scaled)


forward.register_autograd(_backward, setup_context=_save)


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, *others: Tensor | None) -> Tensor:
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in others[:3]]
        ctx.save_for_backward(*others[3:])
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        derivatives.check_first("linear_policy_loss")
        expected = "a loss that is differentiated with gradient {}; a factor before it belongs into normalizer"
        checks.values("weight_grad", grad_loss, grad_loss == 1, expected, 1)
        wanted = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[1:4], strict=True)
        hidden, _, bias = (gradient.to(dtype) if want else None for gradient, dtype, want in wanted)
        return None, hidden, None, bias, None, None, None
