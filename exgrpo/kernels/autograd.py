"""The differentiable operations, one Function each; a backend supplies the forward and the backward."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from exgrpo.kernels.dispatch import Backend
from exgrpo.kernels.inputs import Head, HeadOptions, Needed, PolicyTerms
from exgrpo.kernels.objective import policy_objective
from exgrpo.kernels.results import LogProb, PolicyLoss


def linear_log_prob(head: Head, backend: Backend) -> LogProb:
    """Log-probability and entropy of each token [T]."""
    return LogProb(*_LinearLogProb.apply(*head, backend))


def linear_policy_loss(head: Head, terms: PolicyTerms, backend: Backend) -> PolicyLoss:
    """Loss and per-token results [T]."""
    return PolicyLoss(*_LinearPolicyLoss.apply(*head, terms, _needed(head), backend))


def policy_loss(log_prob: Tensor, entropy: Tensor, terms: PolicyTerms, taking_part: Tensor) -> PolicyLoss:
    """Loss and per-token results [T] from log-probabilities and entropies [T]; ``taking_part`` is bool [T]."""
    return PolicyLoss(*_PolicyLoss.apply(log_prob, entropy, terms, taking_part))


def _needed(head: Head) -> Needed:
    # Asked before a Function begins: inside its forward autograd is always off.
    tensors = (head.hidden, head.weight, head.bias)
    enabled = torch.is_grad_enabled()
    return Needed(*(enabled and tensor is not None and tensor.requires_grad for tensor in tensors))


def _plain(device_type: str) -> torch.autocast:
    # Operands are rounded to autocast's dtype by the head itself; nothing else may be.
    return torch.autocast(device_type, enabled=False)


class _LinearLogProb(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        options: HeadOptions,
        backend: Backend,
    ) -> tuple[Tensor, ...]:
        with _plain(hidden.device.type):
            result, saved = backend.log_prob_forward(Head(hidden, weight, bias, target, options))
        # The weight itself is saved: a sharding engine may free its storage now and gather it anew for the backward.
        ctx.save_for_backward(hidden, weight, bias, target, *saved)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.backend = options, backend
        return tuple(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, *saved = ctx.saved_tensors
        head = Head(hidden, weight, bias, target, ctx.options)
        needed = Needed(*ctx.needs_input_grad[:3])
        with _plain(hidden.device.type):
            gradients = ctx.backend.log_prob_backward(head, tuple(saved), grad_log_prob, grad_entropy, needed)
        return (*gradients, None, None, None)


class _LinearPolicyLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        options: HeadOptions,
        terms: PolicyTerms,
        needed: Needed,
        backend: Backend,
    ) -> tuple[Tensor, ...]:
        head = Head(hidden, weight, bias, target, options)
        with _plain(hidden.device.type):
            result, saved = backend.policy_loss_forward(head, terms, needed)
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*result[1:])
        ctx.set_materialize_grads(False)
        ctx.backend, ctx.tokens, ctx.dtype = backend, hidden.shape[0], hidden.dtype
        return tuple(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_loss is None:
            return (None,) * 8
        gradients = ctx.backend.policy_loss_backward(ctx.saved_tensors, grad_loss, ctx.tokens, ctx.dtype)
        return (*gradients, *[None] * 5)


class _PolicyLoss(Function):
    @staticmethod
    def forward(
        ctx: Any, log_prob: Tensor, entropy: Tensor, terms: PolicyTerms, taking_part: Tensor
    ) -> tuple[Tensor, ...]:
        # Whatever stands at positions left out, NaN and inf included, is replaced before any arithmetic.
        log_prob, old_log_prob, advantage, entropy = (
            values.to(log_prob.dtype).masked_fill(~taking_part, 0)
            for values in (log_prob, terms.old_log_prob, terms.advantage, entropy)
        )
        objective = policy_objective(log_prob, old_log_prob, advantage, terms.replayed, terms.clip, terms.beta)
        normalizer = taking_part.sum().clamp(min=1) if terms.normalizer is None else terms.normalizer
        loss = -(objective.value.sum() + terms.entropy_coef * entropy.sum()) / normalizer
        grad_entropy = torch.zeros_like(entropy).masked_fill(taking_part, -terms.entropy_coef) / normalizer
        ctx.save_for_backward(-objective.coefficient / normalizer, grad_entropy)
        ratio = objective.ratio.masked_fill(~taking_part, 0)
        per_token = (log_prob, entropy, ratio, objective.clipped.to(ratio.dtype))
        ctx.mark_non_differentiable(*per_token)
        return (loss.to(log_prob.dtype), *per_token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_log_prob, grad_entropy = ctx.saved_tensors
        return grad_log_prob * grad_loss, grad_entropy * grad_loss, None, None
