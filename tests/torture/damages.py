"""Damages of the files that a run goes on from, and which checkpoints they touch."""

import json
import random
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from exgrpo.train.checkpoint.listing import EXPERIENCE, FOLDER, MANIFEST, folders
from exgrpo.train.checkpoint.store import SUFFIX

Way = Literal["flipped bit", "cut", "emptied", "removed", "other step's"]
WAYS: tuple[Way, ...] = get_args(Way)
USUAL: tuple[Way, ...] = ("flipped bit", *WAYS)
"""A bit is flipped twice as often as anything else happens."""
NEWEST = 2 / 3
"""How often a damage is one of the newest checkpoint: those of older ones are not read while that is sound."""


@dataclass(frozen=True)
class Damage:
    """A damage that is planned."""

    way: Way
    newest: bool  # whether it is a file that the newest checkpoint needs; else it is any one
    file: float  # in [0, 1) which file, of those in their order
    place: float  # in [0, 1) where in the file
    bit: int  # which one of a byte is flipped

    @classmethod
    def drawn(cls, rng: random.Random) -> "Damage":
        """One of them."""
        return cls(rng.choice(USUAL), rng.random() < NEWEST, rng.random(), rng.random(), rng.randrange(8))

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
        match self.way:
            case "cut":
                return before[:place]
            case "emptied":
                return b""
            case "flipped bit" if before:
                return before[:place] + bytes([before[place] ^ 1 << self.bit]) + before[place + 1 :]
            case "other step's":
                others = [other for other in files if other != path and _like(other) == _like(path)]
                return others[int(self.place * len(others))].read_bytes() if others else before
        return before


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


def newest_sound(needed: dict[int, set[str]], damaged: Collection[str]) -> int | None:
    """The step to go on from; None: every checkpoint is damaged."""
    return max((step for step, files in needed.items() if not files & set(damaged)), default=None)


def unnamed(needed: dict[int, set[str]], damaged: Collection[str], expected: int | None, printed: str) -> list[int]:
    """The steps that are passed over although no damaged file of theirs is named."""
    passed = [step for step in needed if expected is None or step > expected]
    return [step for step in passed if not any(path in printed for path in needed[step] & set(damaged))]
