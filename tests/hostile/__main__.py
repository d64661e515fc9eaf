"""`python -m tests.hostile --cases 10000 --seed 0`: give the project hostile input, and see what it makes of it.

Each kind of input has a process of its own. The same seed gives the same cases with the same version of Hypothesis.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, astuple
from pathlib import Path

from exgrpo.train.common.process import leave

# Threads that wait for each other take the cores from what else runs; no case may reach a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table

from tests.campaigns import run_cases
from tests.hostile.worker import Plan, Summary

SHARES = {"recipes": 240, "command_lines": 160, "rows": 250, "rewards": 30, "models": 90, "answers": 90}
SHARES |= {"kernels": 138, "programs": 2}
"""Of 1000 cases; a case of a reward needs processes, and one of a program starts it."""
TAIL = 3000
"""Characters of what a process has printed that has ended."""


class Options(BaseModel):
    """Give the project hostile input: one clear error, or the right result."""

    model_config = ConfigDict(frozen=True)

    cases: int = Field(10_000, ge=1, description="Of all kinds of input together.")
    seed: int = Field(0, ge=0, description="Decides the cases.")
    kinds: tuple[str, ...] = Field(tuple(SHARES), description="Names of the kinds of input.")
    workers: int = Field(1, ge=1, le=64, description="Processes that do cases at a time.")
    seconds: float = Field(150.0, gt=0, description="A case that takes longer hangs.")
    folder: Path = Field(Path("runs") / "hostile", description="For the files of cases.")


def done(plan: Plan) -> Summary | str:
    """Do the cases of a plan in a process, which ends with all that it has started; a text is a problem."""
    folder = Path(plan.folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = [sys.executable, "-m", "tests.hostile.worker", json.dumps(asdict(plan))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout
        said, status = process.stdout.read(), process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if status == 0 and said:
        return Summary(**json.loads(said))
    if said:
        return f"{said}\nIts files are in {folder / 'files'}"
    what = (folder / "what").read_text() if (folder / "what").exists() else "before the first case"
    printed = (folder / "printed").read_text(errors="replace")[-TAIL:]
    return f"{what}: ends the process, or takes more than {plan.seconds:.0f} s (status {status}): {printed}"


def results(options: Options) -> Iterator[tuple[str, Summary | str]]:
    """What came of each kind."""
    total = sum(SHARES.get(kind, 1) for kind in options.kinds)
    of_kind = {kind: -(-options.cases * SHARES.get(kind, 1) // total) for kind in options.kinds}
    folder = options.folder.absolute()
    plans = [Plan(kind, n, options.seed, str(folder / kind), options.seconds) for kind, n in of_kind.items()]
    with ThreadPoolExecutor(options.workers) as executor:
        yield from zip(options.kinds, executor.map(done, plans), strict=True)


def work(options: Options, console: Console) -> int:
    """Do what the options say; returns how many kinds have a problem."""
    table, wrong = Table("input", "cases", "refused", "right", "longest, s", "most, MiB", "left, MiB"), 0
    for kind, result in results(options):
        if isinstance(result, Summary):
            console.print(f"{kind}: {result.cases} cases")
            table.add_row(kind, *map(str, astuple(result)))
        else:
            wrong += 1
            console.print(f"{kind}: {result}", markup=False, style="red")
    console.print(table)
    return wrong


if __name__ == "__main__":
    leave(run_cases(Options, "python -m tests.hostile", work, sys.argv[1:]))
