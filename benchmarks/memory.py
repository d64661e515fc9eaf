"""Peak memory of a program and its child processes."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from exgrpo.tools.timing import status


def peak() -> dict[str, int]:
    """Return the peak memory of this process so far, in bytes.

    On a GPU, `peak_bytes` is the peak of allocated tensors. Otherwise it is the peak resident memory of the process and
    its running descendants, and `children_bytes` is the descendants' part. Shared memory counts in each process, so
    both are upper bounds.

    Raise OSError if the system keeps no high-water mark.
    """
    if torch.cuda.is_initialized():
        return {"peak_bytes": torch.cuda.max_memory_allocated()}
    children = 0
    for child in _descendants(os.getpid()):
        with suppress(OSError):  # the child may have just ended
            children += status("VmHWM", child)
    return {"peak_bytes": status("VmHWM", os.getpid()) + children, "children_bytes": children}


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            for child in map(int, (task / "children").read_text(encoding="ascii").split()):
                yield child
                yield from _descendants(child)
