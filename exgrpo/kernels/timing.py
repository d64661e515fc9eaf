"""Seconds and memory of calls: interleaved timing, where all calls take turns in one process.

Timed one after the other, minutes apart, on a machine whose clock or load changes, the ratio of two calls would be the
ratio of two moments.
"""

import ctypes
import gc
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], Any]
Clock = Callable[[Call], float]
"""Seconds that a call takes."""

FLUSHED_BYTES = 128 << 20
"""Written between two calls, so that none finds its inputs in a cache: more than most last-level caches hold."""
FEWEST_ROUNDS, LEAST_ROUNDS = 3, 5
"""That are run whatever time they take; the former where an end is set."""
MOST_ROUNDS = 50


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


def interleave(
    calls: dict[str, Call], device: torch.device, budget: float, in_a_row: int = 1, end: float = math.inf
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
        end: of `time.perf_counter`, after which no round is begun but the first FEWEST_ROUNDS.
    """
    least = LEAST_ROUNDS if end == math.inf else FEWEST_ROUNDS
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
        stop = min(begin + budget, end)
        while names and (done < least or (done < MOST_ROUNDS and time.perf_counter() < stop)):
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


def wait(device: torch.device) -> None:
    """Until everything asked of the device is done."""
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
