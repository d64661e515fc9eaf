"""Calls on a head that are timed, and the inputs of heads that are compared.

`make_workload` has tokens that are nearly certain; ways to compute a call are chosen by it. `make_inputs` has a softmax
as sharp as a language model's, with targets sampled from it. Random noise would have logits of equal size: a softmax
that is flat, and tokens of ten nats. In a language model most tokens are nearly certain and a few are open. Built so,
in nats of logit, for any (T, D, V):

- every word has a frequency (Zipf by its index) along one direction that all hidden states share;
- words come in groups of eight that are easily confused: half of a word's vector is its group's;
- a token means one word, drawn by frequency. Its group stands above all other words by a normal `margin`, the word
  above its group by a uniform `lead`; every other logit is spread by `NOISE`.

The mean entropy is 0.5 to 0.65 nats for D >= 64 and V from 1,000 to 152,000, the median 0.1, the 99th percentile 3 to
6; the largest logits are about 25, where bf16 has steps of 0.125.
"""

import argparse
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from exgrpo.kernels.api import linear_log_prob, linear_policy_loss

Call = Callable[[], tuple[Tensor, ...]]

LIFT = 24.0
"""Of the target's logit: most tokens of a language model are nearly certain, and uncertain ones are read again."""
ENTROPY_COEF = 0.001
WRONG = 1e-2
"""Two right ways to compute a call differ by rounding alone, far less than this part of the result."""

GROUP = 8
MARGIN_MEAN, MARGIN_SPREAD = 4.0, 4.0
LEAD = 14.0
NOISE = 1.5
SHARED = 10.0
"""Length of the hidden states along the direction of the frequencies."""
CHUNK_BYTES = 64 << 20


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


def shape_of(words: str) -> Shape:
    """A shape from the command line."""
    try:
        tokens, width, vocabulary = (int(word) for word in words.split(","))
        if min(tokens, width, vocabulary) < 1:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{words!r} is no shape; expected T,D,V, such as 8192,3584,152064") from None
    return Shape(tokens, width, vocabulary)


class LanguageModelInputs(NamedTuple):
    """A head and its tokens."""

    hidden: Tensor
    """[T, D]"""
    weight: Tensor
    """[V, D]"""
    target: Tensor
    """[T] int64, sampled from the softmax."""
    entropy: Tensor
    """[T] fp32, about: from logits in the inputs' dtype."""


def make_inputs(
    tokens: int, width: int, vocabulary: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> LanguageModelInputs:
    """Inputs of a shape; the same for the same arguments."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def uniform(count: int) -> Tensor:
        return torch.rand(count, generator=generator, device=device)

    frequency = -torch.log1p(torch.arange(vocabulary, device=device, dtype=torch.float32))
    frequency -= frequency.mean()
    shared = normal(width)
    shared /= shared.norm()
    centre = normal(-(-vocabulary // GROUP), width) / width**0.5
    word = (vocabulary ** uniform(tokens) - 1).long().clamp(max=vocabulary - 1)  # p(rank) ~ 1 / (rank + 1)
    own = torch.empty(tokens, width, device=device)
    weight = torch.empty(vocabulary, width, dtype=dtype, device=device)
    for start, stop in _spans(vocabulary, 4 * width):
        noise = normal(stop - start, width) / width**0.5
        here = (word >= start) & (word < stop)
        own[here] = noise[word[here] - start]
        group = torch.arange(start, stop, device=device) // GROUP
        rows = (centre[group] + noise) / 2**0.5 + (frequency[start:stop, None] / SHARED) * shared
        weight[start:stop] = rows.to(dtype)
    margin, lead = MARGIN_MEAN + MARGIN_SPREAD * normal(tokens), LEAD * uniform(tokens)
    # All other words together weigh logsumexp(frequency) plus half the variance of their logits, in nats.
    variance = NOISE**2 + 2 * (14**2 + (LEAD / 2) ** 2) / width
    lift = 2**0.5 * (frequency.logsumexp(0) + variance / 2 + margin - frequency[word]).clamp(min=0)
    hidden = SHARED * shared + NOISE * normal(tokens, width)
    hidden += lift[:, None] * centre[word // GROUP] + 2**0.5 * lead[:, None] * own
    hidden = hidden.to(dtype)
    target = torch.empty(tokens, dtype=torch.int64, device=device)
    entropy = torch.empty(tokens, device=device)
    for start, stop in _spans(tokens, 4 * vocabulary):
        log_prob = (hidden[start:stop] @ weight.T).float().log_softmax(-1)
        prob = log_prob.exp()
        target[start:stop] = torch.multinomial(prob, 1, generator=generator).squeeze(-1)
        entropy[start:stop] = -(prob * log_prob).sum(-1)
    return LanguageModelInputs(hidden, weight, target, entropy)


def _spans(length: int, bytes_each: int) -> list[tuple[int, int]]:
    step = max(1, CHUNK_BYTES // bytes_each)
    return [(start, min(start + step, length)) for start in range(0, length, step)]
