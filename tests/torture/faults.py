"""Kills of a run, and damages of the files that it goes on from with the checkpoints that they touch."""

import json
import random
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from exgrpo.train.checkpoint.listing import EXPERIENCE, FOLDER, MANIFEST, folder_name, folders
from exgrpo.train.checkpoint.store import SUFFIX
from tests.torture.runs import STEPS
from tests.train.launch import Ranks

MOMENTS = {
    "any": "",
    "save": "checkpoints/step_*.unfinished",
    "states": "checkpoints/step_*.unfinished/policy/*",
    "experience": "experience/*.tmp",
    "manifest": f"checkpoints/step_*.unfinished/{MANIFEST}*",
    "rotation": "checkpoints/step_*.deleted",
    "last evaluation": f"checkpoints/{folder_name(STEPS)}",
}
"""When a run is killed: at a random share of its time, or when files show what it is doing."""
LATER = {"any": 1.0, "last evaluation": 0.1}
"""A kill comes up to so many times the seconds of an uninterrupted run later; at other moments 0.002 times."""
LOOK_EVERY = 0.0005
WAYS = ("flipped bit", "flipped bit", "cut", "emptied", "removed", "other step's")
NEWEST = 2 / 3
"""How often a damage is one of the newest checkpoint: those of older ones are not read while that is sound."""


@dataclass(frozen=True)
class Kill:
    """A kill that is planned."""

    moment: str
    all_ranks: bool  # else one of them
    rank: int  # which one
    times: int  # the files of the moment are waited for so often
    share: float  # in [0, 1) where within the moment

    @classmethod
    def drawn(cls, rng: random.Random, ranks: int) -> "Kill":
        """One of them."""
        return cls(rng.choice(list(MOMENTS)), rng.random() < 0.5, rng.randrange(ranks), rng.randint(1, 3), rng.random())

    def __str__(self) -> str:
        return f"{'all ranks' if self.all_ranks else 'one rank'} at {self.moment}"

    def strike(self, started: Ranks, run: Path, seconds: float) -> bool:
        """Wait for the moment in what has just been started, and kill; False where the run ended before.

        Args:
            started: the processes.
            run: the folder.
            seconds: of an uninterrupted run.
        """
        pattern, since, seen = MOMENTS[self.moment], time.time_ns(), set[Path]()
        while pattern and len(seen) < (1 if self.moment == "last evaluation" else self.times):
            if not started.running():
                return False
            try:
                seen |= {path for path in run.glob(pattern) if path.stat().st_ctime_ns > since}
            except OSError:  # a file that was listed is gone
                continue
            time.sleep(LOOK_EVERY)
        until = time.monotonic() + self.share * LATER.get(self.moment, 0.002) * seconds
        while time.monotonic() < until and started.running():
            time.sleep(LOOK_EVERY)
        alive = started.running()
        for one in started.ranks if self.all_ranks else [started.ranks[self.rank]]:
            one.send(signal.SIGKILL)
        return alive


@dataclass(frozen=True)
class Damage:
    """A damage that is planned."""

    way: str
    newest: bool  # whether it is a file that the newest checkpoint needs; else it is any one
    file: float  # in [0, 1) which file, of those in their order
    place: float  # in [0, 1) where in the file
    bit: int  # which one of a byte is flipped

    @classmethod
    def drawn(cls, rng: random.Random) -> "Damage":
        """One of them."""
        return cls(rng.choice(WAYS), rng.random() < NEWEST, rng.random(), rng.random(), rng.randrange(8))

    def do(self, run: Path, newest: Collection[str]) -> str | None:
        """Damage a file of a run, of whose newest checkpoint these files are.

        Returns:
            its path in the run's folder; None: there is nothing that would be changed.
        """
        files = files_of(run)
        choice = [path for path in files if not self.newest or str(path.relative_to(run)) in newest]
        path = choice[int(self.file * len(choice))]
        before = path.read_bytes()
        if self.way == "removed":
            path.unlink()
        else:
            after = self._content(path, before, files)
            if after == before:
                return None
            path.write_bytes(after)
        return str(path.relative_to(run))

    def _content(self, path: Path, before: bytes, files: Collection[Path]) -> bytes:
        place = int(self.place * len(before))
        if self.way == "cut":
            return before[:place]
        if self.way == "emptied":
            return b""
        if self.way == "flipped bit":
            return before[:place] + bytes([before[place] ^ 1 << self.bit]) + before[place + 1 :] if before else before
        others = [other for other in files if other != path and _like(other) == _like(path)]
        return others[int(self.place * len(others))].read_bytes() if others else before


def _like(path: Path) -> tuple[str, str]:
    """What the files of all steps have in common: the name within a checkpoint; all files of experience are alike."""
    return (path.parent.name, "") if path.parent.name == EXPERIENCE else (path.parent.name[:4], path.name)


def files_of(run: Path) -> list[Path]:
    """The files that may be damaged, in the order of their names."""
    return sorted(path for root in (FOLDER, EXPERIENCE) for path in (run / root).rglob("*") if path.is_file())


def needed(run: Path) -> dict[int, set[str]]:
    """The files of each checkpoint of a sound run, as paths in its folder: its manifest is read as plain JSON."""
    found = {}
    for folder in folders(run):
        manifest = json.loads((folder / MANIFEST).read_bytes())
        inside = {str(path.relative_to(run)) for path in folder.rglob("*") if path.is_file()}
        found[manifest["step"]] = inside | {f"{EXPERIENCE}/{name}{SUFFIX}" for name in manifest["experience"]}
    return found
