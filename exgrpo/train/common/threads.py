"""Choose the number of CPU threads per process.

Threads meet at a barrier after every operation. If other programs keep a processor busy, one thread waits for its turn
and all others wait for it: a step then takes many times as long as with one thread less.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

LOOK = 0.4  # seconds of measuring the processors' load
FELT = 0.5  # added before rounding down: from this load on a processor counts as busy
VARIABLE = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Threads:
    """Number of threads of each process on this machine, and its origin for messages."""

    count: int
    why: str

    def __str__(self) -> str:
        return f"{self.count} thread{'s' if self.count > 1 else ''} in each process: {self.why}"


def choose(asked: int | None, kept: int | None, ranks: Sequence[set[int]]) -> Threads:
    """Return the threads of a process.

    Args:
        asked: number set by an option; None: not set.
        kept: number of a resumed run with as many processes; None: no such run.
        ranks: processors that each process of the run on this machine may use, those of the one in question first.
    """
    sharing = sum(bool(ranks[0] & processors) for processors in ranks)
    named = os.environ.get(VARIABLE, "").partition(",")[0].strip()
    if asked:
        count, why = asked, "distributed.threads"
    elif named.isdecimal() and int(named):
        count, why = int(named), VARIABLE
    elif kept and kept * sharing <= len(ranks[0]):
        return Threads(kept, "as the run began, which keeps its results the same to the bit")
    else:
        count, why = _free(ranks[0], sharing)
    if kept and kept != count:
        why = f"{why}; the run began with {kept}, so the last bits of its results may differ"
    return Threads(count, why)


def _free(processors: set[int], sharing: int) -> tuple[int, str]:
    allowed = len(processors)
    busy = int(look(processors) + FELT)
    free, why = allowed - busy, f"{allowed} processor{'s' if allowed > 1 else ''}"
    if busy:
        why += f", of which others keep {busy} busy"
    limit = quota()
    if limit is not None and limit < free:
        free, why = int(limit), f"{why}, with a quota of {limit:g}"
    if sharing > 1:
        why += f", for {sharing} processes"
    return max(1, free // sharing), f"{why} (--distributed.threads takes another number)"


def look(processors: set[int]) -> float:
    """Return the number of these processors that programs keep busy, while the processes of the run wait."""
    return sum(load for number, load in enumerate(psutil.cpu_percent(LOOK, percpu=True)) if number in processors) / 100


def quota(mounted: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the processors that the control group (version 2) of this process, and those above, allow; None: no limit.

    `mounted` is the mount point of the groups, `membership` the file that names this process's group.
    """
    limits = []
    with suppress(OSError):
        path = membership.read_text().partition("0::/")[2].strip()
        # A container's own group is mounted at the root, whatever its path outside.
        for group in (mounted / path, *(mounted / path).parents):
            with suppress(OSError):
                allowed, period = (group / "cpu.max").read_text().split()
                limits += [] if allowed == "max" else [int(allowed) / int(period)]
    return min(limits, default=None)
