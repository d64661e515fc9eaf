"""Interleaved timing: all rows of a group take turns in one process, and each test then reports its own times.

pytest-benchmark times one test after the other, minutes apart; on a machine whose clock or load changes, the ratio of
two rows is then the ratio of two moments. Here the first row that asks has the whole group measured, round by round.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], object]

FLUSHED_BYTES = 128 << 20
"""Written between two calls, so that none finds its inputs in a cache: more than most last-level caches hold."""
LEAST_ROUNDS = 5
MOST_ROUNDS = 50
BUDGET = {"tiny": 0.0, "small": 4.0, "full": 20.0}
"""Seconds of rounds per group on a CPU."""
GPU_SHARE = 0.25
"""Of that budget on a GPU, whose calls are shorter and steadier."""


def budget(sizes: str, device: torch.device) -> float:
    """Seconds of rounds per group."""
    return BUDGET[sizes] * (GPU_SHARE if device.type == "cuda" else 1.0)


class Clock:
    """A clock that stands still until it is told how long something took: a timer for pytest-benchmark."""

    __name__ = "interleaved"
    now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now


CLOCK = Clock()


def interleave(
    calls: dict[str, Call], device: torch.device, budget: float, in_a_row: int = 1
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of each call in each round, and the message of those that failed in the warm-up.

    Each call is warmed up once (compiled, its memory taken). A round runs every call once; another one goes first in
    each. Caches are flushed before every call, the garbage collector is off, and the device is waited for.

    Args:
        calls: by name.
        device: that they work on.
        budget: seconds to spend on rounds; at least LEAST_ROUNDS are run.
        in_a_row: how often a call is made in its turn, without a pause; its seconds are those of one. A GPU that is
            busy before a call has a lower clock and hides the host's launches.
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
    for name, call in calls.items():
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
        while names and (done < LEAST_ROUNDS or (done < MOST_ROUNDS and time.perf_counter() - begin < budget)):
            first = done % len(names)
            for name in names[first:] + names[:first]:
                seconds[name].append(timed(calls[name]))
            done += 1
    finally:
        gc.enable()
    return seconds, failed


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median over rounds of the ratio of two rows' times: what the machine did to both in a round cancels."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def paired_spread(numerator: Sequence[float], denominator: Sequence[float]) -> tuple[float, float, float]:
    """`paired_ratio`, with the quartiles of the rounds' ratios around it."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios
    return median, low, high


def replay(benchmark: Any, seconds: Sequence[float]) -> None:
    """Hand measured times to pytest-benchmark as one round each; its timer must be CLOCK."""
    remaining = iter(seconds)

    def rewind() -> None:
        CLOCK.now = 0.0

    def advance() -> None:
        CLOCK.now = next(remaining)

    benchmark.pedantic(advance, setup=rewind, rounds=len(seconds))


def wait(device: torch.device) -> None:
    """Until everything asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
