"""One part at a time: in a process group of its own, with a limit, a log and a line about what came of it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from benchmarks.programs import ROOT
from benchmarks.render import seconds

GRACE = 30.0
"""Seconds from the interrupt to the end of what does not heed it: pytest still writes its report."""


@dataclass(frozen=True)
class Outcome:
    """What became of a command.

    Attributes:
        problem: empty where it succeeded.
        seconds: that it took.
    """

    problem: str
    seconds: float


@dataclass
class Log:
    """Where everything that is said goes, beside the screen.

    Attributes:
        file: of the log. It is kept with the results: no path of this machine is written.
    """

    file: TextIO

    def say(self, line: str) -> None:
        """Write a line."""
        line = line.replace(sys.prefix, "PREFIX").replace(f"{ROOT}{os.sep}", "")
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()

    def copy(self, stream: Iterable[str]) -> None:
        """Write all lines of a stream."""
        for line in stream:
            self.say(line.rstrip("\n"))


def run(
    words: Sequence[str], environment: Mapping[str, str], limit: float, log: Log, statuses: Sequence[int] = (0,)
) -> Outcome:
    """Run a command in the repository's root; it is interrupted at its limit, and killed if that does not help.

    Args:
        words: of the command.
        environment: beside the present one.
        limit: in seconds.
        log: for what it prints.
        statuses: exit statuses that are a success.
    """
    begin = time.monotonic()
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    reader = threading.Thread(target=log.copy, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        problem = _wait(process, limit, statuses)
    finally:  # what it has started ends with it, and with an interrupt of this program
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    reader.join(GRACE)
    return Outcome(problem, time.monotonic() - begin)


def _wait(process: subprocess.Popen[str], limit: float, statuses: Sequence[int]) -> str:
    """Until a process ends; says what was wrong with that."""
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return f"its time was up after {seconds(limit)}"
    return "" if status in statuses else f"exit status {status}"
