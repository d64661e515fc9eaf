"""From the arguments of the public functions to the checked inputs of the backends."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exgrpo.kernels import checks
from exgrpo.kernels.inputs import (
    LEFT_OUT,
    AllowedIds,
    Head,
    HeadArguments,
    HeadOptions,
    LossArguments,
    PolicyTerms,
    PolicyTokens,
    Surrogate,
    VocabShard,
    compute_dtype,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def head(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    given: HeadArguments,
    vocab_group: "ProcessGroup | None",
    memory: int | None,
    counts: tuple[int, int] | None,
) -> Head:
    """Return the checked arguments but for the sets, tokens flattened."""
    bias, temperature, softcap, _, ignore_index = given
    operand = checks.head(hidden, weight, target, bias)
    checks.index("ignore_index", ignore_index)
    checks.group(vocab_group)
    shard = VocabShard.whole(weight.shape[0])
    if vocab_group is not None:
        shard = VocabShard.exchange(weight.shape[0], vocab_group, weight.device)
    target, ignored = checks.target_range(target, shard.vocabulary, ignore_index)
    options = HeadOptions(
        temperature=_temperatures(temperature, target, operand),
        softcap=None if softcap is None else checks.number("softcap", softcap, positive=True),
        operand=operand,
        shard=shard,
        memory=None if memory is None else checks.index("memory", memory, positive=True),
        counts=checks.counts(counts, target.numel()),
    )
    flat_target = target.masked_fill(ignored, LEFT_OUT).reshape(-1)
    flat = hidden.reshape(target.numel(), hidden.shape[-1])
    return Head(flat, weight, bias, flat_target, options)


def keep(head: Head, allowed_tokens: tuple[Tensor, Tensor] | None) -> Head:
    """Return the head over allowed tokens, which are checked; None: over the whole vocabulary."""
    if allowed_tokens is None:
        return head
    options = head.options
    sets = AllowedIds(*checks.allowed_tokens(allowed_tokens, head.target, options.shard.vocabulary))
    return head._replace(options=replace(options, allowed_tokens=sets))


def policy_terms(old_log_prob: Tensor, advantage: Tensor, given: LossArguments, like: Tensor, name: str) -> PolicyTerms:
    """Return the checked terms of the objective, flattened; ``like`` [...], by its ``name``, has all tokens.

    ``old_log_prob`` is checked and flat already.
    """
    replayed, clip, beta, entropy_coef, normalizer, _ = given
    checks.tensor("advantage", advantage)
    spread = checks.per_token("advantage", advantage, like, name)
    if replayed is not None:
        checks.tensor("replayed", replayed, (torch.bool,))
        replayed = checks.per_token("replayed", replayed, like, name).reshape(-1)
    tokens = PolicyTokens(old_log_prob, spread.detach().reshape(-1), replayed)
    surrogate = Surrogate(checks.clip(clip), None if beta is None else checks.number("beta", beta, positive=True))
    coefficient = checks.number("entropy_coef", entropy_coef)
    divisor = _scalar(checks.normalizer(normalizer, tokens.advantage), tokens.advantage)
    return PolicyTerms(tokens, surrogate, coefficient, divisor)


def same_tokens(log_prob: Tensor, old_log_prob: Tensor) -> None:
    """Check two per-token tensors that belong together."""
    checks.tensor("log_prob", log_prob)
    checks.alike("old_log_prob", old_log_prob, log_prob, "log_prob")


def _temperatures(temperature: float | Tensor, target: Tensor, operand: torch.dtype) -> Tensor | None:
    """Return the temperatures [T]; None: all are 1."""
    checked = checks.temperature(temperature, target)
    if isinstance(checked, Tensor):
        return checked
    return None if checked == 1 else _filled(target, (target.numel(),), checked, compute_dtype(operand))


def _scalar(normalizer: float | Tensor | None, tokens: Tensor) -> Tensor | None:
    if isinstance(normalizer, float):
        # In float64: a policy loss in float64 divides by this number, not by its nearest float32.
        return _filled(tokens, (), normalizer, torch.float64)
    return None if normalizer is None else normalizer.to(tokens.device, non_blocking=True)


def _filled(like: Tensor, shape: tuple[int, ...], number: float, dtype: torch.dtype) -> Tensor:
    if torch.compiler.is_compiling():  # a fill fixes a number that the compiler has made symbolic, a sum does not
        return like.new_zeros(shape, dtype=dtype) + number
    return like.new_full(shape, number, dtype=dtype)
