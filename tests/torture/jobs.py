"""The runs that are tortured: what they compute, and how they are started, killed and awaited."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.train.launch import MAIN, Ranks

STEPS, KEEP = 6, 3
OPTIONS = (
    *(f"--steps={STEPS}", "--questions=4", "--rollout.samples=4", "--rollout.engine=transformers"),
    *("--data.train_limit=40", "--data.test_limit=8", "--experience.start_pass_rate=0", "--evaluation.every=3"),
    *("--checkpoint.every=1", f"--checkpoint.keep={KEEP}", "--preflight=off"),
)
"""A checkpoint in each step, so that every run saves often and deletes often."""
LONGEST = 900.0
"""Seconds. A start that takes longer hangs."""

Victim = Literal["one rank", "all ranks"]


@dataclass(frozen=True)
class Kind:
    """What a run computes, and on how many processes; its name is that of its files."""

    name: str
    options: tuple[str, ...]
    ranks: int


METHODS = {
    "plain": (),
    "adapters": ("--lora.rank=4",),
    "calculator": ("--environment.function=calculator",),
}
KINDS = tuple(Kind(f"{name}-{ranks}", options, ranks) for name, options in METHODS.items() for ranks in (1, 2))


class Started(Ranks):
    """A run that was started, with all its processes."""

    def kill(self, victim: Victim, rank: int) -> None:
        """Send SIGKILL to one rank or to all of them."""
        for one in self.ranks if victim == "all ranks" else [self.ranks[rank]]:
            one.send(signal.SIGKILL)


@contextmanager
def start(kind: Kind, run: Path, *arguments: str) -> Iterator[Started]:
    """Start a run of a kind in its folder, or go on with it; if this is left by an exception, it is killed."""
    given = (*OPTIONS, *kind.options, *arguments, f"--output.name={run.name}", f"--output.folder={run.parent}")
    started = Started(MAIN, *given, ranks=kind.ranks)
    try:
        yield started
    except BaseException:
        started.kill("all ranks", 0)
        raise


def do(kind: Kind, run: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As `start`; what it has printed comes back when it has ended."""
    with start(kind, run, *arguments) as started:
        return started.finish(LONGEST)
