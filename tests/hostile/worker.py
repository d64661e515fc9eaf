"""A process that does cases: `python -m tests.hostile.worker`, a plan in JSON as its only argument.

It reads numbers of cases from its standard input, one a line, and writes a line of JSON for each. What a case prints
goes into a file. A case that takes too long ends the process, which first writes down where it is. A process is given
no memory for one case beyond a bound: what wants more gets a MemoryError.

This module imports little: grading processes import it too.
"""

import ctypes
import faulthandler
import gc
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MIB = 2**20
AT_ONCE = 768 * MIB
"""Bytes that a case may take. The largest inputs have 8 MiB, and Python's objects take some dozens of bytes for one of
text; beside that, a model of some kB is made."""
KEPT = 64 * MIB
"""Bytes that a case may leave behind, once it has been done before: allocators give back in pieces."""
DRIFT = 384 * MIB
"""Bytes that all cases of a process may leave behind together: less than 100 kB for each of thousands."""
WARM = 20
"""Cases of each kind that are done first, for nobody to see."""
LOUD = 16 * MIB
"""Bytes that a case may print."""


@dataclass(frozen=True)
class Plan:
    """What a worker is told.

    Attributes:
        seed: of the plan.
        kinds: of its cases.
        folder: of the worker alone.
        seconds: that a case may take.
    """

    seed: int
    kinds: tuple[str, ...]
    folder: str
    seconds: float


@dataclass
class Record:
    """What came of a case; a line of the program's file.

    Attributes:
        case: its number.
        kind: its module.
        what: see `Trial`.
        came: see `Verdict`; "ended" where the process has not survived.
        text: the beginning of the error.
        seconds: that it took.
        mib: memory that it needed at most, beyond what was there.
        left: MiB of memory that the process has more than when it began.
        problems: what was not as promised.
    """

    case: int
    kind: str
    what: str
    came: str
    text: str = ""
    seconds: float = 0.0
    mib: float = 0.0
    left: float = 0.0
    problems: tuple[str, ...] = ()

    def line(self) -> str:
        """As JSON; texts may hold anything."""
        return json.dumps(asdict(self))


def resident(key: str = "VmRSS") -> int:
    """Bytes of memory that this process has, or with VmHWM had at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def _give_back() -> None:
    """Let the system have what nobody uses: allocators keep pieces."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class Worker:
    """Does cases; see the module."""

    def __init__(self, plan: Plan, told: Path) -> None:
        self.plan, self.told = plan, told
        self._warm()
        self.first = resident()

    def _warm(self) -> None:
        """Import what all cases need, so that it does not count as theirs."""
        from tests.hostile.plan import SHARES, kept

        own = SHARES.keys() & set(self.plan.kinds)
        for kind in sorted(own - {"programs"}):
            for number in range(WARM if kind != "rewards" else 1):
                self._done(len(kept()) + number, (kind,))
        gc.collect()
        gc.freeze()

    def do(self, number: int) -> Record:
        """Do a case."""
        faulthandler.dump_traceback_later(self.plan.seconds, exit=True, file=sys.stderr)
        before = resident()
        Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins anew
        began = time.monotonic()
        record = self._done(number, self.plan.kinds)
        record.seconds = round(time.monotonic() - began, 4)
        faulthandler.cancel_dump_traceback_later()
        record.mib = round((resident("VmHWM") - before) / MIB, 1)
        record.problems += tuple(self._memory(record, before))
        record.problems += tuple(self._printed(record))
        return record

    def _done(self, number: int, kinds: tuple[str, ...]) -> Record:
        from exgrpo.train.reward.worker import little_memory
        from tests.hostile.judge import judged
        from tests.hostile.plan import planned

        folder = Path(self.plan.folder) / f"case {number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        kind, trial = planned(self.plan.seed, number, folder, kinds)
        with little_memory(AT_ONCE):
            verdict = judged(trial)
        if not verdict.problems:
            shutil.rmtree(folder, ignore_errors=True)
        return Record(number, kind, trial.what, verdict.came, verdict.text[:300], problems=verdict.problems)

    def _memory(self, record: Record, before: int) -> list[str]:
        problems = []
        if max(resident() - before - KEPT, resident() - self.first - DRIFT) > 0:
            _give_back()
        if resident() - before > KEPT:
            again = resident()
            self._done(record.case, self.plan.kinds)
            _give_back()
            if resident() - again > KEPT:
                problems.append(f"leaves {(resident() - again) / MIB:.0f} MiB behind each time")
        if resident() - self.first > DRIFT:
            problems.append(f"the cases before it left {(resident() - self.first) / MIB:.0f} MiB behind")
            self.first = resident()
        record.left = round((resident() - self.first) / MIB, 1)
        return problems

    def _printed(self, record: Record) -> list[str]:
        """What is wrong with what the case printed."""
        size = self.told.stat().st_size
        with self.told.open("rb") as file:
            text = file.read(LOUD).decode(errors="replace")
        os.ftruncate(2, 0)
        problems = [f"a traceback is printed: {text[-2000:]}"] if "Traceback (most recent call last)" in text else []
        return problems + ([f"{size} bytes are printed"] if size > LOUD else [])


def main(argument: str) -> None:
    """Do the cases whose numbers come."""
    values: dict[str, Any] = json.loads(argument)
    plan = Plan(**values | {"kinds": tuple(values["kinds"])})
    answers = os.fdopen(os.dup(1), "w")
    told = Path(plan.folder) / "printed"
    file = os.open(told, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.ERROR)
    worker = Worker(plan, told)
    os.ftruncate(2, 0)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(worker.do(int(line)).line() + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
