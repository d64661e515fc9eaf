"""Peak memory of a program with its children."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from exgrpo.kernels.timing import status


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
            children += status("VmHWM", child)
    return Peak(status("VmHWM", pid), children)


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            for child in map(int, (task / "children").read_text(encoding="ascii").split()):
                yield child
                yield from _descendants(child)
