"""Inputs of a head with a softmax as sharp as a language model's, and targets sampled from it.

Random noise would have logits of equal size: a softmax that is flat, and tokens of ten nats. In a language model most
tokens are nearly certain and a few are open. Built so, in nats of logit, for any (T, D, V):

- every word has a frequency (Zipf by its index) along one direction that all hidden states share;
- words come in groups of eight that are easily confused: half of a word's vector is its group's;
- a token means one word, drawn by frequency. Its group stands above all other words by a normal `margin`, the word
  above its group by a uniform `lead`; every other logit is spread by `NOISE`.

The mean entropy is 0.5 to 0.65 nats for D >= 64 and V from 1,000 to 152,000, the median 0.1, the 99th percentile 3 to
6; the largest logits are about 25, where bf16 has steps of 0.125.
"""

import torch
from torch import Tensor

GROUP = 8
MARGIN_MEAN, MARGIN_SPREAD = 4.0, 4.0
LEAD = 14.0
NOISE = 1.5
SHARED = 10.0
"""Length of the hidden states along the direction of the frequencies."""
CHUNK_BYTES = 64 << 20


def make_inputs(
    tokens: int, width: int, vocabulary: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden [T, D], weight [V, D] and target [T] int64, the same for the same arguments."""
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
    for start, stop in _spans(tokens, 4 * vocabulary):
        prob = (hidden[start:stop] @ weight.T).float().softmax(-1)
        target[start:stop] = torch.multinomial(prob, 1, generator=generator).squeeze(-1)
    return hidden, weight, target


def _spans(length: int, bytes_each: int) -> list[tuple[int, int]]:
    step = max(1, CHUNK_BYTES // bytes_each)
    return [(start, min(start + step, length)) for start in range(0, length, step)]
