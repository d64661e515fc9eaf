"""`python -m tests.torture --minutes 30 --seed 0`: kill and damage runs, and compare them with uninterrupted ones.

The same seed is the same plan: the program goes on behind the cases in its file of records, which has a line of JSON
for each. Nothing else should write into its folder.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from exgrpo.train.common.durable import claim
from exgrpo.train.common.process import leave, run_program
from exgrpo.train.config.command_line import options_of

# Threads that wait for each other take the cores from what else runs; tiny models are faster with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.torture.campaign import Campaign, Record, drawn
from tests.torture.jobs import KINDS

PROGRAM = "python -m tests.torture"


class Options(BaseModel):
    """Kill and damage runs, and compare what they come to with runs that nothing interrupts."""

    model_config = ConfigDict(frozen=True)

    minutes: float = Field(30.0, gt=0, description="No case begins later.")
    seed: int = Field(0, ge=0, description="Of the plan.")
    cases: int | None = Field(None, ge=1, description="So many cases of the plan at most; None: as the time allows.")
    kinds: tuple[str, ...] = Field(tuple(kind.name for kind in KINDS), description="Names of the kinds of runs.")
    folder: Path = Field(Path("runs") / "torture", description="For the runs and for records_SEED.jsonl.")


def cases_left(options: Options, done: int) -> Iterator[int]:
    """The numbers of the cases to do, until the time is over."""
    end = time.monotonic() + 60 * options.minutes
    while time.monotonic() < end and (options.cases is None or done < options.cases):
        yield done
        done += 1


def work(options: Options, console: Console) -> int:
    """Do what the options say; returns how many cases have a problem."""
    folder = options.folder.absolute()
    path = folder / f"records_{options.seed}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records, campaign = [Record(**json.loads(line)) for line in lines], Campaign(folder)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    begun, kinds = time.monotonic(), [kind for kind in KINDS if kind.name in options.kinds]
    with path.open("a", encoding="utf-8") as file, Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=60 * options.minutes)
        for number in cases_left(options, len(records)):
            case = drawn(options.seed, number, kinds)
            progress.update(bar, description=str(case)[:60], completed=time.monotonic() - begun)
            record = campaign.do(case)
            records.append(record)
            file.write(json.dumps(asdict(record)) + "\n")
            file.flush()
            for problem in record.problems:
                console.print(f"{case}: {problem}", markup=False, style="red")
    console.print(table(records))
    return sum(bool(record.problems) for record in records)


def table(records: Sequence[Record]) -> Table:
    """How often each thing was tried, and how often not everything was kept that is promised."""
    shown = Table("tried", "", "so often")
    for group, tried in (
        ("kills", Counter(kill for record in records for kill in record.kills)),
        ("damages", Counter(way for record in records for way, path in record.damages if "/" in path)),
        ("cases", Counter(record.what for record in records)),
    ):
        for name, number in sorted(tried.items()):
            shown.add_row(group, name, str(number))
        shown.add_row(group, "all", str(tried.total()), end_section=True)
    refused = sum(record.what != "kills" and record.step is None for record in records)
    shown.add_row("without a sound checkpoint", "", str(refused))
    shown.add_row("cases with a problem", "", str(sum(bool(record.problems) for record in records)))
    return shown


def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit status, 1 where a case has a problem."""
    failed = 0

    def within(resources: ExitStack) -> None:
        nonlocal failed
        options = options_of(Options, PROGRAM, argv)
        options.folder.mkdir(parents=True, exist_ok=True)
        resources.enter_context(claim(options.folder))
        failed = work(options, Console())

    return run_program(within, "stopped: the same command goes on with the next case") or int(failed > 0)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
