"""Peak memory of a program with its children."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from exgrpo.kernels.timing import status


def peak() -> dict[str, int]:
    """Return the peak memory of this process so far, in bytes.

    On a GPU, `peak_bytes` is the most that tensors have taken there. Otherwise it is the largest resident memory of the
    process and of the running processes that it started, and `children_bytes` is the part of the latter. Memory that
    they share counts in each, so both are upper bounds.

    Raises:
        OSError: the system keeps no such mark.
    """
    if torch.cuda.is_initialized():
        return {"peak_bytes": torch.cuda.max_memory_allocated()}
    children = 0
    for child in _descendants(os.getpid()):
        with suppress(OSError):  # it has just ended
            children += status("VmHWM", child)
    return {"peak_bytes": status("VmHWM", os.getpid()) + children, "children_bytes": children}


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            for child in map(int, (task / "children").read_text(encoding="ascii").split()):
                yield child
                yield from _descendants(child)
