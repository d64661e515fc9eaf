"""Choose the number of CPU threads per process.

Threads meet at a barrier after every operation. If other programs keep a processor busy, one thread waits for its turn
and all others wait for it: a step then takes many times as long as with one thread less.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

LOOK = 0.4  # seconds of measuring the processors' load
FELT = 0.5  # added before rounding down: from this load on a processor counts as busy
VARIABLE = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Threads:
    """Threads of each process on this machine.

    Attributes:
        count: number of threads.
        why: origin of the number, for messages.
    """

    count: int
    why: str

    def __str__(self) -> str:
        return f"{self.count} thread{'s' if self.count > 1 else ''} in each process: {self.why}"


@dataclass(frozen=True)
class Rank:
    """A process of the run on this machine.

    Attributes:
        pid: its process id; its child processes count as its own.
        processors: numbers of the processors that it may use.
    """

    pid: int
    processors: frozenset[int]

    @classmethod
    def here(cls) -> Self:
        """Return this process."""
        return cls(os.getpid(), frozenset(os.sched_getaffinity(0)))

    def sharing(self, ranks: Sequence["Rank"]) -> int:
        """Return the number of processes that may use processors of this one, itself included."""
        return sum(bool(rank.processors & self.processors) for rank in ranks)


def choose(asked: int | None, kept: int | None, ranks: Sequence[Rank]) -> Threads:
    """Return the threads of a process.

    Args:
        asked: number set by an option; None: not set.
        kept: number of a resumed run with as many processes; None: no such run.
        ranks: processes of the run on this machine, the one in question first.
    """
    own, sharing = ranks[0], ranks[0].sharing(ranks)
    if asked:
        found = Threads(asked, "distributed.threads")
    elif named := _named():
        found = Threads(named, VARIABLE)
    elif kept and kept * sharing <= len(own.processors):
        return Threads(kept, "as the run began, which keeps its results the same to the bit")
    else:
        found = _free(own, sharing, int(look(ranks) + FELT))
    if kept and kept != found.count:
        why = f"{found.why}; the run began with {kept}, so the last bits of its results may differ"
        return Threads(found.count, why)
    return found


def look(ranks: Sequence[Rank]) -> float:
    """Return the number of the first rank's processors that other programs keep busy, measured for `LOOK` seconds."""
    own = [process for rank in ranks for process in _family(rank.pid)]
    before = _seconds(own)
    loads = psutil.cpu_percent(LOOK, percpu=True)
    busy = sum(loads[number] for number in ranks[0].processors if number < len(loads)) / 100
    return max(0.0, busy - (_seconds(own) - before) / LOOK)


def _family(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):  # a killed rank is reported elsewhere
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def _seconds(processes: Sequence[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):
            used = process.cpu_times()
            total += used.user + used.system
    return total


def _named() -> int | None:
    first = os.environ.get(VARIABLE, "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None


def _free(own: Rank, sharing: int, busy: int) -> Threads:
    allowed = len(own.processors)
    free, why = allowed - busy, f"{allowed} processor{'s' if allowed > 1 else ''}"
    if busy:
        why += f", of which others keep {busy} busy"
    limit = quota()
    if limit is not None and limit < free:
        free, why = int(limit), f"{why}, with a quota of {limit:g}"
    if sharing > 1:
        why += f", for {sharing} processes"
    return Threads(max(1, free // sharing), f"{why} (--distributed.threads takes another number)")


def quota(mounted: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the number of processors that the control groups of this process allow; None: no limit.

    Version 2 has the limit in `cpu.max`, version 1 in two files of `cpu`. A parent group's limit applies too.

    Args:
        mounted: mount point of the groups.
        membership: file that lists this process's groups.
    """
    limits = []
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = mounted / controllers
            # A container's own group is mounted at the root, whatever its path outside.
            group = root / path.lstrip("/")
            limits += [_limit(one) for one in (group, *group.parents) if one.is_relative_to(root)]
    return min(filter(None, limits), default=None)


def _limit(group: Path) -> float | None:
    with suppress(OSError, ValueError):
        if (group / "cpu.max").exists():
            allowed, period = (group / "cpu.max").read_text().split()
        else:
            allowed, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if float(allowed) > 0:  # "max" (not a number) and -1 mean no limit
            return float(allowed) / float(period)
    return None
