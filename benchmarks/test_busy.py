"""A training step alone, and beside another program that keeps a processor busy: counted threads and all of them."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from benchmarks.programs import QUIET, ROOT
from benchmarks.timing import CLOCK
from exgrpo.kernels.timing import paired_ratio
from exgrpo.tools.bench import Result, Results

ALONE = "exgrpo alone"
ROWS = {ALONE: False, "exgrpo beside": True, "one thread, alone": False, "all threads, beside": True}
"""Whether another program runs meanwhile."""
STEPS, WARMUP = 7, 3


@contextmanager
def busy() -> Iterator[None]:
    """Another program keeps a processor busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def seconds_of(row: str, folder: Path) -> float:
    """Of a step of the default run: the median of a new run's steps."""
    threads = {"one thread, alone": "1", "all threads, beside": str(len(os.sched_getaffinity(0)))}.get(row)
    command = [sys.executable, str(ROOT / "exgrpo" / "train" / "main.py"), f"--steps={STEPS}", *QUIET]
    command += [f"--output.folder={folder}", "--preflight=off", "--checkpoint.every=None"]
    command += [f"--distributed.threads={threads}"] if threads else []
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with busy() if ROWS[row] else nullcontext():
        subprocess.run(command, env=environment, check=True, capture_output=True)
    (metrics,) = folder.glob("*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return statistics.median(step["seconds"] for step in steps[WARMUP:])


def measure(folder: Path, rounds: int) -> Results:
    """The rows in turn."""
    seconds: dict[str, list[float]] = {row: [] for row in ROWS}
    for number in range(rounds):
        for row in ROWS:
            seconds[row].append(seconds_of(row, folder / f"{row} {number}"))
    return {
        row: Result(tuple(of_row), facts={"times_alone": paired_ratio(of_row, seconds[ALONE])})
        for row, of_row in seconds.items()
    }


@pytest.mark.usefixtures("real_steps")
@pytest.mark.timeout(3600)
@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("row", ROWS)
def test_busy(benchmark, races, rounds, tmp_path, row):
    races.run("training step beside a busy program", row, lambda: measure(tmp_path, rounds), benchmark)
