"""`python -m tests.hostile --cases 10000 --seed 0`: give the project hostile input, and see what it makes of it.

The same seed is the same plan: the program goes on behind the cases in its file of records, which has a line of JSON
for each. Nothing else should write into its folder.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from exgrpo.train.process import leave

# Threads that wait for each other take the cores from what else runs; no case may reach a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.campaigns import records_of, run_cases
from tests.hostile.campaign import done
from tests.hostile.plan import SHARES
from tests.hostile.summary import table
from tests.hostile.worker import Plan, Record

PROGRAM = "python -m tests.hostile"


class Options(BaseModel):
    """Give the project hostile input: one clear error, or the right result."""

    model_config = ConfigDict(frozen=True)

    cases: int = Field(10_000, ge=1, description="So many cases of the plan, those that are done already included.")
    seed: int = Field(0, ge=0, description="Of the plan.")
    kinds: tuple[str, ...] = Field(tuple(SHARES), description="Names of the kinds of input.")
    only: int | None = Field(None, ge=0, description="Do this case alone, again if it is done already.")
    workers: int = Field(1, ge=1, le=64, description="Processes that do cases at a time.")
    seconds: float = Field(150.0, gt=0, description="A case that takes longer hangs.")
    folder: Path = Field(Path("runs") / "hostile", description="For the files of cases and for records_SEED.jsonl.")


def work(options: Options, console: Console) -> int:
    """Do what the options say; returns how many cases have a problem."""
    folder = options.folder.absolute()
    path = folder / f"records_{options.seed}.jsonl"
    records = records_of(path, Record)
    known = {record.case for record in records}
    left = (
        [number for number in range(options.cases) if number not in known] if options.only is None else [options.only]
    )
    plan = Plan(options.seed, options.kinds, str(folder / "files"), options.seconds)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with path.open("a", encoding="utf-8") as file, Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(left))
        for record in done(plan, left, options.workers):
            progress.update(bar, description=f"{record.case} {record.kind}: {record.what}"[:60], advance=1)
            records.append(record)
            file.write(record.line() + "\n")
            file.flush()
            for problem in record.problems:
                console.print(f"{record.case} {record.kind}, {record.what}: {problem}", markup=False, style="red")
    console.print(table(records))
    return sum(bool(record.problems) for record in records)


def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit status, 1 where a case has a problem."""
    return run_cases(Options, PROGRAM, work, argv)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
