"""Calls on a head that are timed, to choose how such calls are computed."""

import argparse
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from exgrpo.kernels.api import linear_log_prob, linear_policy_loss

Call = Callable[[], tuple[Tensor, ...]]
Clock = Callable[[Call], float]
"""Seconds that a call takes."""

LIFT = 24.0
"""Of the target's logit: most tokens of a language model are nearly certain, and uncertain ones are read again."""
ENTROPY_COEF = 0.001
WRONG = 1e-2
"""Two right ways to compute a call differ by rounding alone, far less than this part of the result."""


class Shape(NamedTuple):
    """Of a head and its tokens."""

    tokens: int
    width: int
    vocabulary: int

    def __str__(self) -> str:
        return str(tuple(self))


class Workload(NamedTuple):
    """The inputs of the calls that are timed."""

    hidden: Tensor
    """[T, D]"""
    weight: Tensor
    """[V, D]"""
    target: Tensor
    """[T], each far more likely than all other words"""
    advantage: Tensor
    """[T], not 0"""
    backend: str

    def forward(self) -> tuple[Tensor, ...]:
        """Log-probabilities alone."""
        with torch.no_grad():
            return (linear_log_prob(self.hidden, self.weight, self.target, backend=self.backend).log_prob,)

    def loss(self, entropy_coef: float = 0.0) -> tuple[Tensor, ...]:
        """The policy loss and its gradients."""
        result = linear_policy_loss(
            self.hidden,
            self.weight,
            self.target,
            torch.zeros_like(self.advantage),
            self.advantage,
            entropy_coef=entropy_coef,
            normalizer=len(self.target),
            backend=self.backend,
        )
        gradient, _ = torch.autograd.grad(result.loss, (self.hidden, self.weight))
        return result.log_prob, gradient

    def loss_with_entropy(self) -> tuple[Tensor, ...]:
        """The policy loss with an entropy bonus and its gradients."""
        return self.loss(ENTROPY_COEF)


def make_workload(shape: Shape, dtype: str, device: torch.device, backend: str) -> Workload:
    """Inputs of a shape, the same every time."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    weight = normal(shape.vocabulary, shape.width).div_(math.sqrt(shape.width))
    target = torch.randint(shape.vocabulary, (shape.tokens,), generator=generator, device=device)
    hidden = LIFT * weight[target] + normal(shape.tokens, shape.width)
    sign = normal(shape.tokens).sign()
    hidden, weight = (x.to(getattr(torch, dtype)).requires_grad_() for x in (hidden, weight))
    return Workload(hidden, weight, target, sign * (0.5 + normal(shape.tokens).abs()), backend)


def off(found: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    """Whether results differ by more than rounding does."""
    pairs = ((a.detach().double(), b.detach().double()) for a, b in zip(found, right, strict=True))
    return any(not bool((a - b).norm() <= WRONG * b.norm()) for a, b in pairs)


def seconds_of(call: Call) -> float:
    """The time of a call: by events on a GPU, else by the host's clock."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def shape_of(words: str) -> Shape:
    """A shape from the command line."""
    try:
        tokens, width, vocabulary = (int(word) for word in words.split(","))
        if min(tokens, width, vocabulary) < 1:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{words!r} is no shape; expected T,D,V, such as 8192,3584,152064") from None
    return Shape(tokens, width, vocabulary)
