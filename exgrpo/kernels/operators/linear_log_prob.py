"""`torch.ops.exgrpo.linear_log_prob` and the operator of its backward, which forms the logits anew."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from exgrpo.kernels import derivatives, dispatch
from exgrpo.kernels.chunks import walks
from exgrpo.kernels.inputs import Head, LogProb, Needed, compute_dtype
from exgrpo.kernels.operators.schema import HEAD, WAITS, Schema, flat_head, head_of, without_autocast

SCHEMA = Schema(f"{HEAD}, str backend, Tensor? weight_grad", "(Tensor, Tensor, Tensor)")
BACKWARD = Schema(
    f"{HEAD}, str backend, Tensor saved, Tensor? grad_log_prob, Tensor? grad_entropy, bool[] needed", "Tensor[]"
)
SAVED = ("hidden", "weight", "bias", "target", "temperature", "allowed_ids", "allowed_offsets", "traced")
"""The tensors of a call. The weight is saved as it is: a sharding engine may gather it anew for the backward."""


def linear_log_prob(head: Head, backend: str, weight_grad: Tensor | None) -> LogProb:
    """Log-probability and entropy of each token [T]; the backward adds the weight's gradient to ``weight_grad``."""
    derivatives.check_reverse_mode("linear_log_prob", head.hidden, head.weight, head.bias)
    log_prob, entropy, _ = forward(*SCHEMA.traced((*flat_head(head), backend, weight_grad)))
    return LogProb(log_prob, entropy)


@custom_op("exgrpo::linear_log_prob", mutates_args=(), schema=SCHEMA.text, tags=WAITS)
def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability and entropy [T], and the statistics [4, T] of the backward."""
    given = SCHEMA.given(arguments)
    head = head_of(given)
    with without_autocast(head.hidden):
        taken = dispatch.take_for_head(given["backend"], "linear_log_prob", head)
        result, saved = walks.log_prob_forward(head, taken)
    return result.log_prob, result.entropy, saved


@forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    head = head_of(SCHEMA.named(arguments))
    values = head.hidden.new_empty(head.target.shape, dtype=compute_dtype(head.options.operand))
    return values, torch.empty_like(values), values.new_empty(4, *head.target.shape)


@custom_op("exgrpo::linear_log_prob_backward", mutates_args=(), schema=BACKWARD.text, tags=WAITS)
def backward(*arguments: Any) -> list[Tensor]:
    """The needed ones of the gradients of hidden, weight and bias, in the dtypes of their tensors."""
    return _gradients(BACKWARD.given(arguments))


def _gradients(given: Mapping[str, Any], weight_grad: Tensor | None = None) -> list[Tensor]:
    head = head_of(given)
    with without_autocast(head.hidden):
        taken = dispatch.take_for_head(given["backend"], "linear_log_prob", head)
        upstream = (given["grad_log_prob"], given["grad_entropy"])
        needed = Needed(*given["needed"])
        gradients = walks.log_prob_backward(head, given["saved"], *upstream, needed, taken, weight_grad)
    pairs = zip(gradients, (head.hidden, head.weight, head.bias), strict=True)
    return [gradient.to(tensor.dtype) for gradient, tensor in pairs if gradient is not None and tensor is not None]


@backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    given = BACKWARD.named(arguments)
    tensors = zip((given["hidden"], given["weight"], given["bias"]), given["needed"], strict=True)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x, want in tensors if want and x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    given = SCHEMA.named(inputs)
    _, _, statistics = output
    ctx.save_for_backward(*(given.pop(name) for name in SAVED), statistics)
    ctx.mark_non_differentiable(statistics)
    ctx.set_materialize_grads(False)
    ctx.weight_grad = given.pop("weight_grad")  # not saved: others may add to it meanwhile
    ctx.constants = given


def _backward(
    ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    derivatives.check_first("linear_log_prob")
    *tensors, statistics = ctx.saved_tensors
    wanted = SCHEMA.named(ctx.needs_input_grad)
    needed = {name: wanted[name] for name in Needed._fields}
    given = {
        **dict(zip(SAVED, tensors, strict=True)),
        **ctx.constants,
        "saved": statistics,
        "grad_log_prob": grad_log_prob,
        "grad_entropy": grad_entropy,
        "needed": list(needed.values()),
    }
    if ctx.weight_grad is None:
        found = backward(**given)
    else:
        found = _gradients(given, ctx.weight_grad)
        needed["weight"] = False
    names = (name for name, want in needed.items() if want)
    return SCHEMA.gradients(dict(zip(names, found, strict=True)))


forward.register_autograd(_backward, setup_context=_save)
