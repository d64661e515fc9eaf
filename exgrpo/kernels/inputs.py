"""Checked inputs, as the backends receive them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from exgrpo.kernels.vocab_parallel import VocabShard

IGNORED = -100
"""Target of a position that the caller leaves out, unless the caller says otherwise."""

LEFT_OUT = -1
"""Target of such a token inside the backends."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of logits, statistics, sums and results for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class HeadOptions:
    """How a linear head scores tokens: logits = cap(hidden @ weight.T + bias) / temperature."""

    temperature: Tensor | None
    """[T]; None: 1."""
    softcap: float | None
    """cap(x) = softcap * tanh(x / softcap); None: no cap."""
    operand: torch.dtype
    """The dtype to which hidden states and weight are rounded: theirs, or that of autocast."""
    shard: VocabShard
    """The part of the vocabulary that is held here."""


class Head(NamedTuple):
    """Tokens and the head that scores them."""

    hidden: Tensor
    """[T, D]"""
    weight: Tensor
    """[V, D], or this rank's part of it; the caller's own tensor, never a view or cast of it."""
    bias: Tensor | None
    """[V]"""
    target: Tensor
    """[T] int64, over the whole vocabulary; LEFT_OUT where a token takes no part."""
    options: HeadOptions


class PolicyTerms(NamedTuple):
    """What turns log-probabilities into the loss."""

    old_log_prob: Tensor
    """[T]"""
    advantage: Tensor
    """[T]"""
    replayed: Tensor | None
    """[T] bool; None: no token is replayed."""
    clip: tuple[float, float] | None
    beta: float | None
    entropy_coef: float
    normalizer: Tensor | None
    """Without dimensions; None: the number of tokens that take part."""


class Needed(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


class Gradients(NamedTuple):
    """Gradients of hidden [T, D], weight [V, D] and bias [V]; None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
