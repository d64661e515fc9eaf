"""Peak memory of a call, and of a program with its child processes."""

import ctypes
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch


def status(field: str, pid: int | str = "self") -> int:
    """Return the bytes of a field of a process in Linux, such as its high-water mark.

    Raises:
        OSError: there is no such process, or this system does not report the field.
    """
    path = Path(f"/proc/{pid}/status")
    found = re.search(rf"^{field}:\s+(\d+) kB$", path.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise OSError(f"{path} has no {field}")
    return int(found[1]) * 1024


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Return the peak memory of a call beyond what was held before: its results count, its inputs do not.

    On a GPU it is that of tensors, by the caching allocator. On a CPU it is that of the process, by the high-water mark
    that Linux keeps, which includes compiled code and other libraries; right to about 2 MiB after a warm-up.

    Raises:
        OSError: this system has no such mark that can be reset.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    # A call that finds memory in the C library's freed blocks would seem to take none.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = status("VmRSS")
    result = call()
    peak = status("VmHWM")
    del result
    return max(0, peak - before)


def program_peak() -> dict[str, int]:
    """Return the peak memory of this process so far, in bytes.

    On a GPU, `peak_bytes` is the peak of allocated tensors. Otherwise it is the peak resident memory of the process and
    its running descendants, and `children_bytes` is the descendants' part. Shared memory counts in each process, so
    both are upper bounds. Raise OSError if the system keeps no high-water mark.
    """
    import psutil  # the trainer's programs have it; heads are measured without it

    if torch.cuda.is_initialized():
        return {"peak_bytes": torch.cuda.max_memory_allocated()}
    children = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(OSError):  # the child may have just ended
            children += status("VmHWM", child.pid)
    return {"peak_bytes": status("VmHWM") + children, "children_bytes": children}
