"""A process that does cases of one kind: `python -m tests.hostile.worker`, a `Plan` in JSON as its only argument.

Hypothesis draws the cases, and makes the one that has a problem as simple as it can. What a case prints goes into a
file. A case that takes too long ends the process, which first writes down where it is. A case that wants more memory
than a bound gets a MemoryError. The process ends with a line of JSON, what came of the cases, and status 0, or with the
problem of the simplest case that has one, whose files stay.

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
from collections.abc import Callable
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
WARM = 10
"""Cases that are done first, for nobody to see: they import what all cases need."""
LOUD = 16 * MIB
"""Bytes that a case may print."""


@dataclass(frozen=True)
class Plan:
    """What a worker is told: a module of cases, how many, a seed, a folder of its own, and seconds for a case."""

    kind: str
    cases: int
    seed: int
    folder: str
    seconds: float


@dataclass
class Summary:
    """What came of cases: how many were refused and right, the seconds and MiB of the largest, and MiB left behind."""

    cases: int = 0
    refused: int = 0
    right: int = 0
    seconds: float = 0.0
    mib: float = 0.0
    left: float = 0.0


class ProblemError(AssertionError):
    """A case is not as promised."""


def check(kind: str, cases: int, seed: int, folder: Path, do: Callable[[Any], object]) -> None:
    """Draw cases and do them. Raises ProblemError, as `do` does, for the simplest case that has a problem."""
    from importlib import import_module

    import hypothesis
    from hypothesis import strategies as st

    name, _, way = kind.partition(":")
    ways = [of for of in import_module(f"tests.hostile.{name}").WAYS if not way or of.__name__ == way]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
        report_multiple_bugs=False,
    )
    @hypothesis.given(st.data())
    def each(data: st.DataObject) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        do(data.draw(st.sampled_from(ways))(data.draw, folder))

    each()


def judge(trial: Any) -> str:
    """Do a case; returns what came. Raises ProblemError where it is not as promised."""
    from exgrpo.train.reward.worker import little_memory
    from tests.hostile.judge import judged

    with little_memory(AT_ONCE):
        verdict = judged(trial)
    if verdict.problems:
        raise ProblemError(f"{trial.what}: " + "\n".join(verdict.problems))
    return verdict.came


def resident(key: str = "VmRSS") -> int:
    """Bytes of memory that this process has, or with VmHWM had at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def _give_back() -> None:
    """Let the system have what nobody uses: allocators keep pieces."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class Worker:
    """Does cases, and looks at what they take, leave behind and print."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.summary, self.told = plan, Summary(), Path(plan.folder) / "printed"
        self.first = resident()

    def do(self, trial: Any) -> None:
        """Do a case."""
        (Path(self.plan.folder) / "what").write_text(trial.what)
        faulthandler.dump_traceback_later(self.plan.seconds, exit=True, file=sys.stderr)
        before = resident()
        Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins anew
        began = time.monotonic()
        came = judge(trial)
        one = self.summary
        one.seconds = round(max(one.seconds, time.monotonic() - began), 1)
        faulthandler.cancel_dump_traceback_later()
        one.mib = round(max(one.mib, (resident("VmHWM") - before) / MIB), 1)
        one.cases += 1
        one.refused, one.right = one.refused + (came == "refused"), one.right + (came == "right")
        if problem := self._memory(trial, before) or self._printed():
            raise ProblemError(f"{trial.what}: {problem}")

    def _memory(self, trial: Any, before: int) -> str:
        if max(resident() - before - KEPT, resident() - self.first - DRIFT) > 0:
            _give_back()
        if resident() - before > KEPT:
            again = resident()
            judge(trial)
            _give_back()
            if resident() - again > KEPT:
                return f"leaves {(resident() - again) / MIB:.0f} MiB behind each time"
        self.summary.left = round(max(self.summary.left, (resident() - self.first) / MIB), 1)
        drifted = resident() - self.first > DRIFT
        return f"the cases before it left {(resident() - self.first) / MIB:.0f} MiB behind" if drifted else ""

    def _printed(self) -> str:
        """What is wrong with what the case printed."""
        size = self.told.stat().st_size
        with self.told.open("rb") as file:
            text = file.read(LOUD).decode(errors="replace")
        os.ftruncate(2, 0)
        if "Traceback (most recent call last)" in text:
            return f"a traceback is printed: {text[-2000:]}"
        return f"{size} bytes are printed" if size > LOUD else ""


def main(argument: str) -> None:
    """Do the cases of a plan."""
    plan = Plan(**json.loads(argument))
    answer = os.fdopen(os.dup(1), "w")
    folder = Path(plan.folder)
    file = os.open(folder / "printed", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.ERROR)
    try:
        if plan.kind != "programs":
            check(plan.kind, WARM if plan.kind != "rewards" else 1, 0, folder / "files", judge)
        gc.collect()
        gc.freeze()
        os.ftruncate(2, 0)
        worker = Worker(plan)
        check(plan.kind, plan.cases, plan.seed, folder / "files", worker.do)
    except ProblemError as problem:
        answer.write(str(problem))
        answer.flush()
        os._exit(1)
    answer.write(json.dumps(asdict(worker.summary)))
    answer.flush()


if __name__ == "__main__":
    main(sys.argv[1])
