"""The operators that know of no head: over tokens with their log-probabilities, over rewards, over segments.

They are `torch.ops.exgrpo.token_objective`, of which the policy loss is made, and two without derivatives:
`torch.ops.exgrpo.group_advantage` and `torch.ops.exgrpo.segment_mean`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from exgrpo.kernels import derivatives, dispatch
from exgrpo.kernels.inputs import PolicyTerms, ScoredTokens
from exgrpo.kernels.operators.linear_policy_loss import scale_gradient
from exgrpo.kernels.operators.schema import SURROGATE, TOKENS, WAITS, Schema, surrogate_of, tokens_of

SCHEMA = Schema(
    f"Tensor log_prob, Tensor? entropy, {TOKENS}, Tensor? mask, {SURROGATE}, str backend",
    "(Tensor, Tensor, Tensor)",
)


def policy_loss(
    log_prob: Tensor, entropy: Tensor | None, terms: PolicyTerms, mask: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    """The loss; and log-probability, entropy, ratio and clipped of each token, detached, [4, T]."""
    derivatives.check_reverse_mode("policy_loss", log_prob, entropy)
    arguments = (log_prob, entropy, *terms.tokens, mask, *terms.surrogate, backend)
    sums, per_token, _ = token_objective(*SCHEMA.traced(arguments))
    value, entropies, count = sums.unbind()
    normalizer = count.detach().clamp(min=1) if terms.normalizer is None else terms.normalizer
    total = value if entropy is None else value + terms.entropy_coef * entropies
    return -total / normalizer, per_token


@custom_op("exgrpo::token_objective", mutates_args=(), schema=SCHEMA.text)
def token_objective(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of `objective.TokenObjective`."""
    given = SCHEMA.given(arguments)
    scored = ScoredTokens(given["log_prob"], given["entropy"], tokens_of(given), given["mask"])
    taken = dispatch.take_for_values(given["backend"], "policy_loss", scored.log_prob)
    return (*taken.token_objective(scored, surrogate_of(given)),)


@token_objective.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    log_prob = SCHEMA.named(arguments)["log_prob"]
    sums = log_prob.new_empty(3, dtype=torch.float64)
    return sums, log_prob.new_empty(4, *log_prob.shape), torch.empty_like(log_prob)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, per_token, coefficient = output
    ctx.save_for_backward(coefficient, SCHEMA.named(inputs)["mask"])
    ctx.mark_non_differentiable(per_token, coefficient)


def _backward(ctx: Any, grad_sums: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    derivatives.check_first("policy_loss")
    coefficient, mask = ctx.saved_tensors
    of_value, of_entropies, _ = grad_sums
    wanted = SCHEMA.named(ctx.needs_input_grad)
    found = {}
    if wanted["log_prob"]:
        found["log_prob"] = scale_gradient(coefficient, of_value, coefficient.dtype)
    if wanted["entropy"]:
        spread = of_entropies.to(coefficient.dtype).expand_as(coefficient)
        found["entropy"] = spread if mask is None else spread.masked_fill(~mask, 0)
    return SCHEMA.gradients(found)


token_objective.register_autograd(_backward, setup_context=_save)


@custom_op("exgrpo::group_advantage", mutates_args=(), tags=WAITS)
def group_advantage(reward: Tensor, group: Tensor, scale_by_std: bool, backend: str) -> Tensor:
    """Advantages [N] in float64."""
    return dispatch.take_for_values(backend, "group_advantage", reward).centre_groups(reward, group, scale_by_std)


@group_advantage.register_fake
def _(reward: Tensor, group: Tensor, scale_by_std: bool, backend: str) -> Tensor:
    return reward.new_empty(reward.shape, dtype=torch.float64)


@custom_op("exgrpo::segment_mean", mutates_args=())
def segment_mean(values: Tensor, counted: Tensor, offsets: Tensor, backend: str) -> Tensor:
    """Mean of the counted values [T] of each segment [offsets[i], offsets[i + 1]), [N]; 0 if it has none."""
    return dispatch.take_for_values(backend, "sequence_entropy", values).segment_mean(values, counted, offsets)


@segment_mean.register_fake
def _(values: Tensor, counted: Tensor, offsets: Tensor, backend: str) -> Tensor:
    return values.new_empty(offsets.shape[0] - 1)
