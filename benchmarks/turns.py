"""Programs that take turns: processes of their own, alive at the same time, of which one works while the others sleep.

A line of JSON on a program's standard input is its turn; it works, and a line of JSON on a second pipe is its answer.
Between turns it sleeps on the pipe and takes no processor. So programs that cannot share a process are still measured
within the same minute, and each has a memory of its own.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.memory import Peak, peak_of
from benchmarks.programs import ROOT, python_path

Facts = dict[str, Any]
LAST_LINES = 15
ANSWERS = "BENCHMARK_ANSWERS"
"""Environment variable with the number of the pipe for answers."""
SPINS = {"GOMP_SPINCOUNT": "1000"}
"""How long threads of OpenMP that wait take the processor, unless the environment says otherwise.

By its own default one program spins 300 times as long as another, by how many threads it has. On a machine that is busy
otherwise this made TRL's steps up to 20 times slower, and no step of exgrpo.
"""
PATIENCE = 60
"""Seconds that a program has to end by itself."""


class ProgramError(Exception):
    """A program that takes turns has ended; the message has its last words."""


class Turns:
    """The program's side. The pipe for answers is not standard output, where libraries print."""

    def __init__(self) -> None:
        answers = int(os.environ[ANSWERS])
        os.set_inheritable(answers, False)
        self._answers = os.fdopen(answers, "w", encoding="utf-8")

    def wait(self) -> Facts | None:
        """What the next turn asks for; None: there is none."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def answer(self, facts: Facts) -> None:
        """End the turn; the first answer, before any turn, says that the program is ready."""
        print(json.dumps(facts), file=self._answers, flush=True)


@dataclass(frozen=True)
class Turn:
    """A turn that was taken.

    Attributes:
        asked: what for.
        seconds: from the question to the answer, by the driver's clock.
        facts: the answer.
        peak: memory of the program until then.
    """

    asked: Facts
    seconds: float
    facts: Facts
    peak: Peak


class Program:
    """The driver's side: a running program. Use it as a context manager.

    Args:
        command: what to run.
        log: file for what it prints.

    Raises:
        ProgramError: it does not get ready.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._words, self._log = " ".join(command), log
        reader, writer = os.pipe()
        self._answers = os.fdopen(reader, encoding="utf-8")
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**SPINS, **os.environ, "PYTHONPATH": python_path(), ANSWERS: str(writer)},
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                pass_fds=[writer],
            )
        os.close(writer)
        try:
            self._answer()
        except BaseException:
            self.close(patience=0)
            raise

    def turn(self, asked: Facts) -> Turn:
        """Have the program take a turn.

        Raises:
            ProgramError: it has ended.
        """
        assert self._process.stdin is not None
        start = time.perf_counter()
        with suppress(BrokenPipeError):  # what it said before it ended is in the log
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        facts = self._answer()
        return Turn(asked, time.perf_counter() - start, facts, peak_of(self._process.pid))

    def _answer(self) -> Facts:
        line = self._answers.readline()
        if not line:
            status = self._process.wait()
            killed = " (killed: is there memory for all programs at once?)" if status == -signal.SIGKILL else ""
            said = "\n".join(self._log.read_text(errors="replace").splitlines()[-LAST_LINES:])
            raise ProgramError(f"{self._words} has ended with exit status {status}{killed}:\n{said}")
        return json.loads(line)

    def close(self, patience: float = PATIENCE) -> None:
        """Let it end within so many seconds, or else end it, with all that it started."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._answers.close()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(PATIENCE if kind is None else 0)  # an interrupt does not wait for a step to end


def command(module: str, *options: str) -> list[str]:
    """What runs `main` of a module.

    Not `python -m`: the processes that multiprocessing starts import the module that it runs, and their memory would be
    that of the benchmark's imports.
    """
    return [sys.executable, "-c", f"import sys; from {module} import main; sys.exit(main(sys.argv[1:]))", *options]


def take_turns(
    programs: Mapping[str, Program],
    warmup: int,
    rounds: int,
    asked: Mapping[str, Sequence[Facts]] = MappingProxyType({}),
) -> dict[str, list[Turn]]:
    """The turns of each program, after `warmup` rounds that do not count.

    In a round every program takes its turns, and another program begins in each.

    Args:
        programs: by name.
        warmup: rounds before those that count.
        rounds: that count.
        asked: by name of the program, what its turns of a round are for; without, it has one turn.
    """
    names = list(programs)
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            taken = [programs[name].turn(one) for one in asked.get(name, [{}])]
            if number >= warmup:
                turns[name] += taken
    return turns
