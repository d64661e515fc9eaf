"""When a run is killed: at a share of its time, or when a file says what it is doing."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from exgrpo.train.checkpoint.listing import DELETED, EXPERIENCE, FOLDER, MANIFEST, UNFINISHED, folder_name
from exgrpo.train.checkpoint.resume import FINISHED
from tests.torture.jobs import KEEP, STEPS, Started, Victim

Moment = Literal["any", "start", "save", "states", "experience", "manifest", "rotation", "last evaluation"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)
"""At any time of a run; while it starts or goes on; when a checkpoint is begun, has its first file of states, writes
experience, writes its manifest; when an older one is deleted; and between the last checkpoint and the end."""
LOOK_EVERY = 0.0005
LATER = 0.03
"""Seconds. A kill comes so long, at most, after the file that it waits for."""
Times = dict[str, float]
"""Seconds of an uninterrupted run by its parts: "whole"; "start", up to its first checkpoint; "end", after its last."""


@dataclass(frozen=True)
class Kill:
    """A kill that is planned."""

    moment: Moment
    victim: Victim
    rank: int  # which one, where it is one
    step: int  # the first one whose checkpoint is waited for
    share: float  # in [0, 1) where within the moment

    @classmethod
    def drawn(cls, rng: random.Random, ranks: int) -> "Kill":
        """One of them."""
        victim: Victim = rng.choice(("one rank", "all ranks"))
        return cls(rng.choice(MOMENTS), victim, rng.randrange(ranks), rng.randint(1, STEPS), rng.random())

    def named(self, going_on: bool) -> str:
        """In words; the start of a run that goes on is a resume."""
        moment = "resume" if going_on and self.moment == "start" else self.moment
        return f"{self.victim} at {moment}"


def strike(kill: Kill, started: Started, run: Path, times: Times) -> bool:
    """Wait for the moment of a kill of what has just been started, and kill; False where the run ended before."""
    come = _signs(kill, run, time.time_ns()).get(kill.moment, lambda: True)
    later = {"any": times["whole"], "start": times["start"], "last evaluation": times["end"]}.get(kill.moment, LATER)
    while not come():
        if not started.running():
            return False
        time.sleep(LOOK_EVERY)
    until = time.monotonic() + kill.share * later
    while time.monotonic() < until:
        if not started.running():
            return False
        time.sleep(LOOK_EVERY)
    alive = started.running()
    started.kill(kill.victim, kill.rank)
    return alive


def _signs(kill: Kill, run: Path, since: int) -> dict[Moment, Callable[[], bool]]:
    """What shows that a moment has come, in files that are newer than the start."""
    root = run / FOLDER

    def new(pattern: str, where: Path = root, first: int = 0) -> bool:
        try:
            found = [path for path in where.glob(pattern) if path.stat().st_ctime_ns > since]
        except OSError:  # a file that was listed is gone
            return False
        return any(not first or int(path.name[5:13]) >= first for path in found)

    last = root / folder_name(STEPS)
    return {
        "save": lambda: new(f"step_*{UNFINISHED}", first=kill.step),
        "states": lambda: new(f"step_*{UNFINISHED}/policy/*"),
        "experience": lambda: new("*.tmp", run / EXPERIENCE),
        "manifest": lambda: new(f"step_*{UNFINISHED}/{MANIFEST}*"),
        "rotation": lambda: new(f"step_*{DELETED}") or len(list(root.glob("step_*[0-9]"))) > KEEP,
        "last evaluation": lambda: last.exists() and not (run / FINISHED).exists(),
    }
