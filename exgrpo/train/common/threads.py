"""How many threads a process computes with on a CPU, and what others do on its processors meanwhile.

Threads meet at a barrier after every operation. Where others keep a processor busy, one thread waits for its turn,
and all threads wait for that one: a step then takes many times as long as with one thread less.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Self

import psutil

LOOK = 0.4
"""Seconds for which the load of the processors is observed."""
FELT = 0.5
"""So many processors that others keep busy, rounded, are one."""
SLOWER = 1.5
"""Factor by which a step has to be slower to be told."""
CALM_STEPS = 3
"""So many are compared with at least: the first step of a run is slow."""
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


class Others:
    """The load that is not the run's, on the processors that the first of its processes on this machine may use."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks, self._processors = [rank.pid for rank in ranks], ranks[0].processors
        self._families: dict[int, float] = {}
        self._before = self._now()

    def busy(self) -> float:
        """Processors that others have kept busy since the call before."""
        before, self._before = self._before, self._now()
        passed, all_of_them, own = (now - then for now, then in zip(self._before, before, strict=True))
        return min(max(0.0, all_of_them - own) / max(passed, 1e-3), float(len(self._processors)))

    def _now(self) -> tuple[float, float, float]:
        """Seconds: the clock, the work of the processors, the run's share of it."""
        for pid in self._ranks:
            with suppress(psutil.Error):  # one that was killed is told elsewhere
                process = psutil.Process(pid)
                for member in (process, *process.children(recursive=True)):
                    with suppress(psutil.Error):
                        used = member.cpu_times()
                        self._families[member.pid] = used.user + used.system
        each = psutil.cpu_times(percpu=True)
        mine = [each[number] for number in self._processors if number < len(each)]
        work = sum(sum(times[:8]) - times.idle - times.iowait for times in mine)  # guests are in the first of them
        return time.monotonic(), work, sum(self._families.values())


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
    """Processors that others keep busy, observed for `LOOK` seconds; see `Others`."""
    others = Others(ranks)
    time.sleep(LOOK)
    return others.busy()


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

    Version 2 says it in `cpu.max`, version 1 in two files of `cpu`. No group has more than those above it.

    Args:
        mounted: where the groups are.
        membership: which ones this process is in.
    """
    limits = []
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = mounted / controllers
            # In a container its own group is mounted at the root, whatever the path is called outside.
            group = root / path.lstrip("/")
            limits += [_limit(one) for one in (group, *group.parents) if one.is_relative_to(root)]
    return min(filter(None, limits), default=None)


def _limit(group: Path) -> float | None:
    with suppress(OSError, ValueError):
        if (group / "cpu.max").exists():
            allowed, period = (group / "cpu.max").read_text().split()
        else:
            allowed, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if float(allowed) > 0:  # "max" is no number, and -1 no limit
            return float(allowed) / float(period)
    return None


class Neighbours:
    """Tells once when others come to the processors of a run that goes on.

    Args:
        busy: gives the processors that others have kept busy since it was called before.
        allowed: processors that the run may use.
        threads: of each of its processes on them.
        sharing: how many these are.
    """

    def __init__(self, busy: Callable[[], float], allowed: int, threads: int, sharing: int) -> None:
        self._busy, self._allowed, self._threads, self._sharing = busy, allowed, threads, sharing
        self._calm: list[float] = []
        self._said = False

    @classmethod
    def of(cls, ranks: Sequence[Rank], threads: int) -> Self:
        """Those of the first of the run's processes on this machine, of so many threads each."""
        return cls(Others(ranks).busy, len(ranks[0].processors), threads, ranks[0].sharing(ranks))

    def observe(self, metrics: dict[str, float]) -> str | None:
        """Take in a finished step: add its metric, and give what a person is told.

        Args:
            metrics: of the step, with its `seconds`; `mfu` tells how fast it was for its work.
        """
        busy = self._busy()
        metrics["seconds/others"] = busy * metrics["seconds"]
        if not metrics["mfu"]:  # the model did nothing here, as in a step without an update whose answers servers give
            return None
        if busy < FELT or busy + self._threads * self._sharing < self._allowed + FELT:
            self._calm.append(metrics["mfu"])
            return None
        if self._said or len(self._calm) < CALM_STEPS or metrics["mfu"] * SLOWER > median(self._calm):
            return None
        self._said = True
        return (
            f"warning: others keep {busy:.1f} of {self._allowed} processors busy: this step took "
            f"{median(self._calm) / metrics['mfu']:.1f} times as long for its work as those before{self._remedy(busy)}"
        )

    def _remedy(self, busy: float) -> str:
        fewer = max(1, (self._allowed - int(busy + FELT)) // self._sharing)
        if fewer >= self._threads:
            return ""
        return f". Its threads wait for each other: stop the run, and go on with --distributed.threads {fewer}"
