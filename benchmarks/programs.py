"""Benchmarks in separate processes, and the reward that they train on."""

import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
QUIET = ("--data.test", "None", "--output.trackers", "--output.save_model", "False")
"""Training options that disable evaluation, trackers and saving the model."""
SPINS = {"GOMP_SPINCOUNT": "1000"}
"""Spins of waiting OpenMP threads, unless set in the environment.

The default depends on the number of threads: on a busy machine it made TRL's steps up to 20 times slower, and none of
exgrpo's.
"""
LAST_LINES = 15
REWARD = f"{__name__}:coin"


def coin(response: str, gold: str) -> float:
    """Return 1 for half of all responses, chosen by their hash: cheap to compute, and learnable by any model."""
    return float(zlib.crc32(response.encode()) % 2)


def words(options: Mapping[str, object]) -> list[str]:
    """Return options as words of a command line."""
    return [str(word) for name, value in options.items() for word in (f"--{name}", value)]


class ProgramError(Exception):
    """A program has failed; the message has its last lines."""


def answer_of(module: str, out: Path, *options: str) -> Any:
    """Run `main([OUT, *OPTIONS])` of a module in a new process; return the content of OUT, a JSON file.

    Raise ProgramError if it fails.
    """
    # Not `python -m`: multiprocessing's children import the main module, and would also hold its imports in memory.
    code = f"import sys; from {module} import main; sys.exit(main(sys.argv[1:]))"
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code, str(out), *options],
        cwd=ROOT,
        env={**SPINS, **os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        killed = " (killed: is there enough memory?)" if done.returncode == -signal.SIGKILL else ""
        lines = "\n".join(done.stdout.splitlines()[-LAST_LINES:])
        raise ProgramError(f"{module} ended with exit status {done.returncode}{killed}:\n{lines}")
    return json.loads(out.read_text(encoding="utf-8"))
