"""`python -m tests.torture --minutes 30 --seed 0`: kill and damage runs, and compare them with uninterrupted ones.

The same seed is the same plan: the program goes on behind the cases in its file of records, which has a line of JSON
for each. Nothing else should write into its folder.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
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

from tests.torture.campaign import Campaign, Record, drawn
from tests.torture.runs import KINDS

PROGRAM = "python -m tests.torture"


class Options(BaseModel):
    """Kill and damage runs, and compare what they come to with runs that nothing interrupts."""

    model_config = ConfigDict(frozen=True)

    minutes: float = Field(30.0, gt=0, description="No case begins later.")
    seed: int = Field(0, ge=0, description="Of the plan.")
    cases: int | None = Field(None, ge=1, description="So many cases of the plan at most; None: as the time allows.")
    kinds: tuple[str, ...] = Field(tuple(kind.name for kind in KINDS), description="Names of the kinds of runs.")
    folder: Path = Field(Path("runs") / "torture", description="For the runs and for records_SEED.jsonl.")


def work(options: Options) -> int:
    """Do what the options say; returns how many cases have a problem."""
    end, folder = time.monotonic() + 60 * options.minutes, options.folder.absolute()
    path, kinds = folder / f"records_{options.seed}.jsonl", [kind for kind in KINDS if kind.name in options.kinds]
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records, campaign = [Record(**json.loads(line)) for line in lines], Campaign(folder)
    with path.open("a", encoding="utf-8") as file:
        while time.monotonic() < end and len(records) != options.cases:
            record = campaign.do(drawn(options.seed, len(records), kinds))
            records.append(record)
            file.write(json.dumps(asdict(record)) + "\n")
            file.flush()
            print(*(f"case {record.case}: {one}" for one in record.problems or ["as promised"]), sep="\n", flush=True)
    tried = Counter(record.what for record in records)
    for record in records:
        tried.update(record.kills)
    failed = sum(bool(record.problems) for record in records)
    print(*(f"{name}: {number}" for name, number in sorted(tried.items())), sep="\n")
    print(f"damaged files: {sum(len(record.damages) for record in records)}\ncases with a problem: {failed}")
    return failed


def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit status, 1 where a case has a problem."""
    failed = 0

    def within(resources: ExitStack) -> None:
        nonlocal failed
        options = options_of(Options, PROGRAM, argv)
        options.folder.mkdir(parents=True, exist_ok=True)
        resources.enter_context(claim(options.folder))
        failed = work(options)

    return run_program(within, "stopped: the same command goes on with the next case") or int(failed > 0)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
