"""Peak memory of a call."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.timing import wait


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
    before = _status("VmRSS")
    result = call()
    peak = _status("VmHWM")
    del result
    return max(0, peak - before)


def _release_free_memory() -> None:
    """Give back what the C library keeps of freed blocks: a call that finds memory there would seem to take none."""
    ctypes.CDLL(None).malloc_trim(0)


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024
