"""The runs that are tortured: what they compute, and how they are started, killed and awaited."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from tests.train.launch import MAIN, Ranks, command, environment
from tests.train.warm import ROOT

STEPS, KEEP = 6, 3
OPTIONS = (
    *(f"--steps={STEPS}", "--questions=4", "--rollout.samples=4", "--rollout.engine=transformers"),
    *("--data.train_limit=40", "--data.test_limit=8", "--experience.start_pass_rate=0", "--evaluation.every=3"),
    *("--checkpoint.every=1", f"--checkpoint.keep={KEEP}", "--preflight=off"),
)
"""A checkpoint in each step, so that every run saves often and deletes often."""
LONGEST = 900.0
"""Seconds. A start that takes longer hangs."""
LOOK_EVERY = 0.05

Victim = Literal["one rank", "all ranks", "launcher"]


@dataclass(frozen=True)
class Kind:
    """What a run computes, and on how many processes.

    Attributes:
        name: of its files and its rows in tables.
        options: of the program, besides those that all kinds have.
        ranks: so many processes.
    """

    name: str
    options: tuple[str, ...]
    ranks: int


METHODS = {
    "plain": (),
    "adapters": ("--lora.rank=4",),
    "calculator": ("--environment.function=calculator",),
}
KINDS = tuple(Kind(f"{name}-{ranks}", options, ranks) for name, options in METHODS.items() for ranks in (1, 2))


class Started(Protocol):
    """A program that was started, with all its processes."""

    def running(self) -> bool:
        """Whether it has not ended, nor has one of its ranks failed."""

    def kill(self, victim: Victim, rank: int) -> None:
        """Send SIGKILL to one rank, to all of them or to their launcher."""

    def finish(self) -> subprocess.CompletedProcess[str]:
        """What it has printed and its exit status, once none of its processes is left.

        Raises:
            TimeoutExpired: one is left after `LONGEST` seconds; all are killed.
        """


class WarmRanks(Ranks):
    """See `Started`: ranks without a launcher, whose imports a server has done."""

    def kill(self, victim: Victim, rank: int) -> None:
        """See `Started`."""
        for one in self.ranks if victim == "all ranks" else [self.ranks[rank]]:
            one.send(signal.SIGKILL)

    def finish(self, timeout: float = LONGEST) -> subprocess.CompletedProcess[str]:
        """See `Started`."""
        return super().finish(timeout)


class Launched:
    """See `Started`: ranks as a user starts them, by DeepSpeed's launcher.

    Args:
        folder: for what they print.
        arguments: of the program; one of them names a folder that no other program has.
        ranks: how many.
    """

    def __init__(self, folder: Path, *arguments: str, ranks: int) -> None:
        self._printed = [folder / "out", folder / "err"]
        self._mark = arguments[-1]
        with self._printed[0].open("w") as out, self._printed[1].open("w") as err:
            self._process = subprocess.Popen(
                command(MAIN, *arguments, ranks=ranks),
                cwd=ROOT,
                env=environment(),
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def running(self) -> bool:
        """See `Started`."""
        return self._process.poll() is None

    def kill(self, victim: Victim, rank: int) -> None:
        """See `Started`; only the launcher is a victim here."""
        self._process.kill()

    def finish(self) -> subprocess.CompletedProcess[str]:
        """See `Started`."""
        deadline = time.monotonic() + LONGEST
        try:
            while self._left() and time.monotonic() < deadline:
                time.sleep(LOOK_EVERY)
        finally:
            left = self._left()
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        status = self._process.wait()
        if left:
            raise subprocess.TimeoutExpired(self._process.args, LONGEST)
        return subprocess.CompletedProcess(
            self._process.args, status, *(path.read_text(errors="replace") for path in self._printed)
        )

    def _left(self) -> list[int]:
        """Processes with the mark on their command line that have not ended."""
        self._process.poll()  # else it stays as one whose exit status nobody has asked for
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if self._mark in path.read_bytes().decode(errors="replace").split("\0"):
                    found.append(int(path.parent.name))
        return found


@contextmanager
def start(kind: Kind, run: Path, *arguments: str, launcher: bool = False) -> Iterator[Started]:
    """Start a run of a kind, or go on with it; if this is left by an exception, it is killed.

    Args:
        kind: of the run.
        run: its folder.
        arguments: further ones of the program.
        launcher: whether DeepSpeed's launcher starts the ranks.
    """
    given = (*OPTIONS, *kind.options, *arguments, f"--output.name={run.name}", f"--output.folder={run.parent}")
    started: Started
    started = Launched(run.parent, *given, ranks=kind.ranks) if launcher else WarmRanks(MAIN, *given, ranks=kind.ranks)
    try:
        yield started
    except BaseException:
        started.kill("all ranks", 0)
        raise


def do(kind: Kind, run: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As `start`; what it has printed comes back when it has ended."""
    with start(kind, run, *arguments) as started:
        return started.finish()
