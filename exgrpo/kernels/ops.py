"""The operations as PyTorch sees them: `torch.ops.exgrpo`, each with its fake and its derivative.

torch.compile takes an operation as one node, without a graph break; what happens inside, chunks and the waits for their
number included, is a backend's affair. Other derivatives than the first are refused: see `derivatives`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from exgrpo.kernels import derivatives, dispatch
from exgrpo.kernels.chunks import chunking
from exgrpo.kernels.chunks import log_prob as log_prob_walks
from exgrpo.kernels.chunks import policy_loss as policy_loss_walk
from exgrpo.kernels.inputs import Gradients, Head, HeadOptions, Needed, PolicyTerms, compute_dtype
from exgrpo.kernels.results import LogProb
from exgrpo.kernels.vocab_parallel import VocabShard

SCALED_AT_ONCE = 4 << 20
"""Entries of a gradient that a CPU scales before the next ones: fewer would have threads wait for each other often."""


def linear_log_prob(head: Head, backend: str) -> LogProb:
    """Log-probability and entropy of each token [T]."""
    derivatives.check_reverse_mode("linear_log_prob", head.hidden, head.weight, head.bias)
    log_prob, entropy, _ = _linear_log_prob(*_flat(head), backend)
    return LogProb(log_prob, entropy)


def linear_policy_loss(head: Head, terms: PolicyTerms, backend: str) -> tuple[Tensor, Tensor]:
    """The loss; and log-probability, entropy, ratio and clipped of each token, detached, [4, T]."""
    tensors = (head.hidden, head.weight, head.bias)
    derivatives.check_reverse_mode("linear_policy_loss", *tensors)
    enabled = torch.is_grad_enabled()
    needed = [enabled and derivatives.requires_grad(tensor) for tensor in tensors]
    # Nobody keeps the gradients: their memory is the backward's.
    loss, per_token, *_ = _linear_policy_loss(*_flat(head), *terms, needed, True, backend)
    return loss, per_token


def token_objective(
    log_prob: Tensor, entropy: Tensor | None, terms: PolicyTerms, mask: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    """The loss; and log-probability, entropy, ratio and clipped of each token, detached, [4, T]."""
    derivatives.check_reverse_mode("policy_loss", log_prob, entropy)
    tokens = (log_prob, entropy, terms.old_log_prob, terms.advantage, terms.replayed, mask)
    sums, per_token, _ = _token_objective(*tokens, terms.clip, terms.beta, backend)
    value, entropies, count = sums.unbind()
    normalizer = count.detach().clamp(min=1) if terms.normalizer is None else terms.normalizer
    return -(value + terms.entropy_coef * entropies) / normalizer, per_token


def _flat(head: Head) -> tuple[Any, ...]:
    """A head as arguments that an operator's schema can have; `_head` is the way back."""
    options, shard = head.options, head.options.shard
    numbers = [shard.size, shard.offset, shard.vocabulary, shard.largest]
    return (*head[:4], options.temperature, options.softcap, options.operand, numbers, shard.group_name)


def _head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: Tensor | None,
    softcap: float | None,
    operand: torch.dtype,
    shard: Sequence[int],
    group: str,
) -> Head:
    size, offset, vocabulary, largest = shard
    options = HeadOptions(temperature, softcap, operand, VocabShard(size, offset, vocabulary, largest, group))
    return Head(hidden, weight, bias, target, options)


def _of_head(operation: str, head: Head, backend: str) -> dispatch.Backend:
    options = head.options
    device, tokens = head.hidden.device, head.target.numel()
    return dispatch.take(backend, operation, device, options.operand, tokens, options.shard.largest)


def _of_tokens(operation: str, values: Tensor, backend: str) -> dispatch.Backend:
    return dispatch.take(backend, operation, values.device, values.dtype, values.numel(), 1)


def _plain(tensor: Tensor) -> torch.autocast:
    # Operands are rounded to autocast's dtype by the head itself; nothing else may be.
    return torch.autocast(tensor.device.type, enabled=False)


def _wanted(gradients: Gradients, like: Sequence[Tensor | None]) -> list[Tensor]:
    """The gradients that there are, in the dtypes of their tensors."""
    pairs = zip(gradients, like, strict=True)
    return [gradient.to(tensor.dtype) for gradient, tensor in pairs if gradient is not None and tensor is not None]


def _placed(gradients: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    """Gradients of hidden, weight and bias: the given ones where needed, else None."""
    remaining = iter(gradients)
    return [next(remaining) if want else None for want in needed]


@custom_op("exgrpo::linear_log_prob", mutates_args=())
def _linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: Tensor | None,
    softcap: float | None,
    operand: torch.dtype,
    shard: Sequence[int],
    group: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability and entropy [T], and the statistics [4, T] of the backward."""
    head = _head(hidden, weight, bias, target, temperature, softcap, operand, shard, group)
    with _plain(hidden):
        passes_of = _of_head("linear_log_prob", head, backend).passes_of
        result, saved = log_prob_walks.log_prob_forward(head, passes_of)
    return result.log_prob, result.entropy, saved


@_linear_log_prob.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    values = hidden.new_empty(target.shape, dtype=compute_dtype(rest[2]))
    return values, torch.empty_like(values), values.new_empty(4, *target.shape)


@custom_op("exgrpo::linear_log_prob_backward", mutates_args=())
def _linear_log_prob_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: Tensor | None,
    softcap: float | None,
    operand: torch.dtype,
    shard: Sequence[int],
    group: str,
    backend: str,
    saved: Tensor,
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    needed: Sequence[bool],
) -> list[Tensor]:
    """The needed ones of the gradients of hidden, weight and bias."""
    head = _head(hidden, weight, bias, target, temperature, softcap, operand, shard, group)
    with _plain(hidden):
        passes_of = _of_head("linear_log_prob", head, backend).passes_of
        upstream = (grad_log_prob, grad_entropy)
        gradients = log_prob_walks.log_prob_backward(head, saved, *upstream, Needed(*needed), passes_of)
    return _wanted(gradients, (hidden, weight, bias))


@_linear_log_prob_backward.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    tensors = zip((hidden, weight, bias), rest[-1], strict=True)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x, want in tensors if want and x is not None]


def _log_prob_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, target, temperature, *constants = inputs
    # The weight itself is saved: a sharding engine may free its storage now and gather it anew for the backward.
    ctx.save_for_backward(hidden, weight, bias, target, temperature, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.constants = constants


def _log_prob_backward(
    ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    derivatives.check_first("linear_log_prob")
    *tensors, saved = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[:3])
    gradients = _linear_log_prob_backward(*tensors, *ctx.constants, saved, grad_log_prob, grad_entropy, needed)
    return (*_placed(gradients, needed), *[None] * 7)


_linear_log_prob.register_autograd(_log_prob_backward, setup_context=_log_prob_context)


@custom_op("exgrpo::linear_policy_loss", mutates_args=())
def _linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: Tensor | None,
    softcap: float | None,
    operand: torch.dtype,
    shard: Sequence[int],
    group: str,
    old_log_prob: Tensor,
    advantage: Tensor,
    replayed: Tensor | None,
    clip: Sequence[float] | None,
    beta: float | None,
    entropy_coef: float,
    normalizer: Tensor | None,
    needed: Sequence[bool],
    in_place: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss, the per-token results [4, T], and the gradients; empty ones where they are not needed.

    ``in_place``: the backward may scale the gradients where they are.
    """
    head = _head(hidden, weight, bias, target, temperature, softcap, operand, shard, group)
    pair = None if clip is None else (clip[0], clip[1])
    terms = PolicyTerms(old_log_prob, advantage, replayed, pair, beta, entropy_coef, normalizer)
    with _plain(hidden):
        passes_of = _of_head("linear_policy_loss", head, backend).passes_of
        loss, per_token, gradients = policy_loss_walk.policy_loss_forward(head, terms, Needed(*needed), passes_of)
    of_hidden, of_weight, of_bias = (
        loss.new_empty(0) if gradient is None or tensor is None else gradient.to(_held_dtype(tensor))
        for gradient, tensor in zip(gradients, (hidden, weight, bias), strict=True)
    )
    return loss, per_token, of_hidden, of_weight, of_bias


def _held_dtype(tensor: Tensor) -> torch.dtype:
    """Of a gradient between forward and backward: where it is scaled in place then, that of the tensor.

    Not float16, which has no range for the gradients of a token mean before a scaler has multiplied them; nor on a GPU,
    where to round them first would be another pass over memory.
    """
    early = tensor.device.type == "cpu" and tensor.dtype == torch.bfloat16
    return tensor.dtype if early else compute_dtype(tensor.dtype)


@_linear_policy_loss.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    loss = hidden.new_empty((), dtype=compute_dtype(rest[2]))
    tensors = zip((hidden, weight, bias), rest[-3], strict=True)
    gradients = (
        loss.new_empty(x.shape, dtype=_held_dtype(x)) if want and x is not None else loss.new_empty(0)
        for x, want in tensors
    )
    return loss, loss.new_empty(4, *target.shape), *gradients


@custom_op("exgrpo::scale_gradient", mutates_args=())
def _scale_gradient(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient times ``factor``, a tensor without dimensions, in ``dtype``: one reading and one writing."""
    result = torch.empty_like(gradient, dtype=dtype, memory_format=torch.contiguous_format)
    if gradient.device.type != "cpu":
        return torch.mul(gradient, factor, out=result)
    # A CPU has the products in the gradient's dtype first: those of a block take no new memory.
    source, written = gradient.view(-1), result.view(-1)
    for start, end in chunking.spans(source.numel(), SCALED_AT_ONCE):
        torch.mul(source[start:end], factor, out=written[start:end])
    return result


@_scale_gradient.register_fake
def _(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype, memory_format=torch.contiguous_format)


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same in the memory of ``gradient``, unless another backward of the graph will want it."""
    real = type(gradient) is Tensor  # a compiler traces with others, and reuses memory itself
    if real and gradient.dtype == dtype and not torch._C._autograd._get_current_graph_task_keep_graph():
        return gradient.mul_(factor)
    return _scale_gradient(gradient, factor, dtype)


def _policy_loss_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needed, ctx.in_place = inputs[-3:-1]
    pairs = zip(output[2:], inputs[:3], ctx.needed, strict=True)
    kept = [(gradient, tensor.dtype) for gradient, tensor, want in pairs if want]
    ctx.save_for_backward(*(gradient for gradient, _ in kept))
    ctx.dtypes = [dtype for _, dtype in kept]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _policy_loss_backward(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return (None,) * 19
    derivatives.check_first("linear_policy_loss")
    pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    scale = _scaled if ctx.in_place else _scale_gradient
    gradients = [scale(gradient, grad_loss, dtype) for gradient, dtype in pairs]
    return (*_placed(gradients, ctx.needed), *[None] * 16)


_linear_policy_loss.register_autograd(_policy_loss_backward, setup_context=_policy_loss_context)


@custom_op("exgrpo::token_objective", mutates_args=())
def _token_objective(
    log_prob: Tensor,
    entropy: Tensor | None,
    old_log_prob: Tensor,
    advantage: Tensor,
    replayed: Tensor | None,
    mask: Tensor | None,
    clip: Sequence[float] | None,
    beta: float | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Float64 sums of objectives, entropies and tokens [3]; the per-token results [4, T]; the derivatives [T]."""
    pair = None if clip is None else (clip[0], clip[1])
    tokens = (log_prob, entropy, old_log_prob, advantage, replayed, mask)
    return _of_tokens("policy_loss", log_prob, backend).token_objective(*tokens, pair, beta)


@_token_objective.register_fake
def _(log_prob: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    sums = log_prob.new_empty(3, dtype=torch.float64)
    return sums, log_prob.new_empty(4, *log_prob.shape), torch.empty_like(log_prob)


def _objective_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, per_token, coefficient = output
    ctx.save_for_backward(coefficient, inputs[5])
    ctx.mark_non_differentiable(per_token, coefficient)


def _objective_backward(ctx: Any, grad_sums: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    derivatives.check_first("policy_loss")
    coefficient, mask = ctx.saved_tensors
    of_log_prob = of_entropy = None
    if ctx.needs_input_grad[0]:
        of_log_prob = _scale_gradient(coefficient, grad_sums[0], coefficient.dtype)
    if ctx.needs_input_grad[1]:
        of_entropy = grad_sums[1].to(coefficient.dtype).expand_as(coefficient)
        of_entropy = of_entropy if mask is None else of_entropy.masked_fill(~mask, 0)
    return (of_log_prob, of_entropy, *[None] * 7)


_token_objective.register_autograd(_objective_backward, setup_context=_objective_context)


@custom_op("exgrpo::group_advantage", mutates_args=())
def group_advantage(reward: Tensor, group: Tensor, scale_by_std: bool, backend: str) -> Tensor:
    """Advantages [N] in float64."""
    return _of_tokens("group_advantage", reward, backend).centre_groups(reward, group, scale_by_std)


@group_advantage.register_fake
def _(reward: Tensor, group: Tensor, scale_by_std: bool, backend: str) -> Tensor:
    return reward.new_empty(reward.shape, dtype=torch.float64)


@custom_op("exgrpo::segment_mean", mutates_args=())
def segment_mean(values: Tensor, counted: Tensor, offsets: Tensor, backend: str) -> Tensor:
    """Mean of the counted values [T] of each segment [offsets[i], offsets[i + 1]), [N]; 0 if it has none."""
    return _of_tokens("sequence_entropy", values, backend).segment_mean(values, counted, offsets)


@segment_mean.register_fake
def _(values: Tensor, counted: Tensor, offsets: Tensor, backend: str) -> Tensor:
    return values.new_empty(len(offsets) - 1)
