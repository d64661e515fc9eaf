"""Peak memory of a call, and of a program with its children."""

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
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


def device_peak() -> dict[str, int]:
    """`device_bytes`: the most that the tensors of this process have taken on its GPU; nothing where it uses none."""
    return {"device_bytes": torch.cuda.max_memory_allocated()} if torch.cuda.is_initialized() else {}


@dataclass(frozen=True)
class Peak:
    """The most memory that a program has held at a time, in bytes.

    Attributes:
        own: of its process.
        children: of the processes that it started and that still run, summed up. What they share counts in each, so
            this is an upper bound.
    """

    own: int
    children: int

    @property
    def total(self) -> int:
        """Of all."""
        return self.own + self.children


def peak_of(pid: int) -> Peak:
    """The peak of a running process so far.

    Raises:
        OSError: there is none, or this system keeps no such mark.
    """
    children = 0
    for child in _descendants(pid):
        with suppress(OSError):  # it has just ended
            children += _status("VmHWM", child)
    return Peak(_status("VmHWM", pid), children)


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            for child in map(int, (task / "children").read_text(encoding="ascii").split()):
                yield child
                yield from _descendants(child)


def _status(field: str, pid: int | str = "self") -> int:
    path = Path(f"/proc/{pid}/status")
    found = re.search(rf"^{field}:\s+(\d+) kB$", path.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise OSError(f"{path} has no {field}")
    return int(found[1]) * 1024
