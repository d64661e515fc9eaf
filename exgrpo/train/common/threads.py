"""How many threads a process computes with on a CPU.

Threads meet at a barrier after every operation. Where others keep a processor busy, one thread waits for its turn,
and all threads wait for that one: a step then takes many times as long as with one thread less.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

LOOK = 0.4
"""Seconds for which the load of the processors is observed."""
FELT = 0.5
"""So many processors that others keep busy, rounded, are one."""
VARIABLE = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Threads:
    """The threads of each process on this machine.

    Attributes:
        count: how many.
        why: where the number comes from.
    """

    count: int
    why: str

    def __str__(self) -> str:
        return f"{self.count} thread{'s' if self.count > 1 else ''} in each process: {self.why}"


@dataclass(frozen=True)
class Rank:
    """A process of the run on this machine.

    Attributes:
        pid: of the process; the processes that it has started belong to it.
        processors: numbers of those that it may use.
    """

    pid: int
    processors: frozenset[int]

    @classmethod
    def here(cls) -> Self:
        """This process."""
        return cls(os.getpid(), frozenset(os.sched_getaffinity(0)))

    def sharing(self, ranks: Sequence["Rank"]) -> int:
        """How many processes have processors of this one, itself included."""
        return sum(bool(rank.processors & self.processors) for rank in ranks)


def choose(asked: int | None, kept: int | None, ranks: Sequence[Rank]) -> Threads:
    """The threads of a process.

    Args:
        asked: by an option; None: not.
        kept: of the run that goes on with as many processes; None: there is none.
        ranks: the processes of the run on this machine, the one that is meant first.
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
    """Processors that others keep busy, of those that the first process may use, observed for `LOOK` seconds."""
    before = _now(ranks)
    time.sleep(LOOK)
    passed, work, of_run = (now - then for now, then in zip(_now(ranks), before, strict=True))
    return min(max(0.0, work - of_run) / passed, float(len(ranks[0].processors)))


def _now(ranks: Sequence[Rank]) -> tuple[float, float, float]:
    """Seconds: the clock, the work of the processors, that of the run and of what it has started."""
    of_run = 0.0
    for rank in ranks:
        with suppress(psutil.Error):  # one that was killed is told elsewhere
            process = psutil.Process(rank.pid)
            for member in (process, *process.children(recursive=True)):
                with suppress(psutil.Error):
                    used = member.cpu_times()
                    of_run += used.user + used.system
    each = psutil.cpu_times(percpu=True)
    mine = [each[number] for number in ranks[0].processors if number < len(each)]
    work = sum(sum(times[:8]) - times.idle - times.iowait for times in mine)  # guests are in the first of them
    return time.monotonic(), work, of_run


def _named() -> int | None:
    """What the environment says, of which the first of several numbers is meant; None: nothing, or no number."""
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
    """Processors that the control groups of this process leave it; None: there is no limit.

    No group has more than those above it.

    Args:
        mounted: where the groups are (version 2).
        membership: which one this process is in.
    """
    limits = []
    with suppress(OSError):
        groups = [line.removeprefix("0::/") for line in membership.read_text().splitlines() if line.startswith("0::")]
        # In a container its own group is mounted at the root, whatever the path is called outside.
        for group in (mounted / path for path in groups):
            limits += [_limit(one) for one in (group, *group.parents) if one.is_relative_to(mounted)]
    return min(filter(None, limits), default=None)


def _limit(group: Path) -> float | None:
    with suppress(OSError, ValueError):  # "max" is no number
        allowed, period = (group / "cpu.max").read_text().split()
        return float(allowed) / float(period)
    return None
