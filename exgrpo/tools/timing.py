"""Inputs of timed calls on a head, and the seconds and the memory that calls take.

`make_inputs` has a softmax as sharp as a language model's, with targets sampled from it. Random noise would have logits
of equal size: a softmax that is flat, and tokens of ten nats. In a language model most tokens are nearly certain and a
few are open. Built so, in nats of logit, for any (T, D, V):

- every word has a frequency (Zipf by its index) along one direction that all hidden states share;
- words come in groups of eight that are easily confused: half of a word's vector is its group's;
- a token means one word, drawn by frequency. Its group stands above all other words by a normal `margin`, the word
  above its group by a uniform `lead`; every other logit is spread by `NOISE`.

The mean entropy is 0.5 to 0.65 nats for D >= 64 and V from 1,000 to 152,000, the median 0.1, the 99th percentile 3 to
6; the largest logits are about 25, where bf16 has steps of 0.125.

Calls take turns in one process (`interleave`). Timed one after the other, minutes apart, on a machine whose clock or
load changes, the ratio of two calls would be the ratio of two moments.
"""

import ctypes
import gc
import logging
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

Call = Callable[[], Any]
LOG = logging.getLogger(__name__)
"""DEBUG: the call that is timed next."""

FLUSHED_BYTES = 128 << 20
"""Written between two calls, so that none finds its inputs in a cache: more than most last-level caches hold."""
FEWEST_ROUNDS, LEAST_ROUNDS = 3, 5
"""Rounds that are run whatever time they take, if there is a limit of time and if there is none."""
MOST_ROUNDS = 50

ENTROPY_COEF = 0.001

GROUP = 8
MARGIN_MEAN, MARGIN_SPREAD = 4.0, 4.0
LEAD = 14.0
NOISE = 1.5
SHARED = 10.0
"""Length of the hidden states along the direction of the frequencies."""
CHUNK_BYTES = 64 << 20


class Shape(NamedTuple):
    """Shape of a head and its tokens."""

    tokens: int
    width: int
    vocabulary: int

    def __str__(self) -> str:
        return str(tuple(self))


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


def interleave(
    calls: dict[str, Call],
    device: torch.device,
    budget: float,
    in_a_row: int = 1,
    *,
    least: int = LEAST_ROUNDS,
    end: float = math.inf,
    patience: float = math.inf,
    warm: bool = False,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of each call in each round, and the message of those that failed in the warm-up.

    Each call is warmed up once (compiled, its memory taken). A round runs every call once; another one goes first in
    each. Caches are flushed before every call, the garbage collector is off, and the device is waited for.

    Args:
        calls: by name.
        device: that they work on.
        budget: seconds to spend on rounds; at least `least` are run.
        in_a_row: how often a call is made in its turn, without a pause; its seconds are those of one. A GPU that is
            busy before a call has a lower clock and hides the host's launches.
        least: rounds that are run whatever time they take.
        end: of `time.perf_counter`, after which no round is begun but the first `least`.
        warm: True if all calls are warm already.
        patience: a call that takes this multiple of the fastest one in the first round is in no other round.
    """
    stream = torch.empty(FLUSHED_BYTES // 4, device=device)

    def timed(call: Call) -> float:
        stream.fill_(1.0)
        wait(device)
        start = time.perf_counter()
        for _ in range(in_a_row):
            call()
        wait(device)
        return (time.perf_counter() - start) / in_a_row

    failed = {}
    for name, call in () if warm else calls.items():
        LOG.debug("%s: warm-up", name)
        try:
            timed(call)
        except Exception as error:  # whatever a peer raises is the reason why its row is skipped
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    names = [name for name in calls if name not in failed]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        begin, done = time.perf_counter(), 0
        stop = min(begin + budget, end)
        while names and (done < least or (done < MOST_ROUNDS and time.perf_counter() < stop)):
            first = done % len(names)
            for name in names[first:] + names[:first]:
                LOG.debug("%s: round %d", name, done + 1)
                seconds[name].append(timed(calls[name]))
            done += 1
            if done == 1:
                limit = patience * min(times[0] for times in seconds.values())
                names = [name for name in names if seconds[name][0] <= limit]
    finally:
        gc.enable()
    return seconds, failed


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median over the rounds of both rows of the ratio of their times: what the machine did to both cancels."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=False))


def paired_spread(numerator: Sequence[float], denominator: Sequence[float]) -> tuple[float, float, float]:
    """`paired_ratio`, with the quartiles of the rounds' ratios around it."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios
    return median, low, high


def wait(device: torch.device) -> None:
    """Wait until all work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that a call takes at its peak beyond what was held before; its results count, its inputs do not.

    On a GPU what tensors take, by the caching allocator. On a CPU what the process takes, by the high-water mark that
    Linux keeps: so compiled code and other libraries are seen too. Call it after a warm-up; right to about 2 MiB.

    Raises:
        OSError: this system has no such mark that can be reset.
    """
    if device.type == "cuda":
        wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        wait(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    _release_free_memory()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = status("VmRSS")
    result = call()
    peak = status("VmHWM")
    del result
    return max(0, peak - before)


def _release_free_memory() -> None:
    """Give back what the C library keeps of freed blocks: a call that finds memory there would seem to take none."""
    ctypes.CDLL(None).malloc_trim(0)


def status(field: str, pid: int | str = "self") -> int:
    """Bytes of a field of a process in Linux, such as its high-water mark.

    Raises:
        OSError: there is no such process, or this system does not tell.
    """
    path = Path(f"/proc/{pid}/status")
    found = re.search(rf"^{field}:\s+(\d+) kB$", path.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise OSError(f"{path} has no {field}")
    return int(found[1]) * 1024
