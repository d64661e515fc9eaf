"""Which checkpoints a run has: their folders, and what is wrong with some of them at first sight."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from exgrpo.train.checkpoint.durable import DamagedFileError
from exgrpo.train.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from exgrpo.train.checkpoint.store import SUFFIX
from exgrpo.train.errors import CheckpointError

FOLDER, EXPERIENCE = "checkpoints", "experience"
UNFINISHED, DELETED = ".unfinished", ".deleted"
"""End the names of folders that are no checkpoints yet, and none any more."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint and what its manifest says."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The last training step that is in it."""
        return self.manifest.step


def folder_name(step: int) -> str:
    """Of the checkpoint of a step."""
    return f"step_{step:08d}"


def folders(run: Path) -> list[Path]:
    """The folders that pass for checkpoints of a run, newest first.

    Raises:
        OSError: they cannot be listed.
    """
    root = run / FOLDER
    names = os.listdir(root) if root.is_dir() else []
    return [root / name for name in sorted(names, reverse=True) if re.fullmatch(r"step_\d+", name)]


def inspect(folder: Path) -> Checkpoint:
    """Read a checkpoint's manifest and compare the sizes of its files, which takes no time.

    Raises:
        DamagedFileError: it is not complete, or its manifest is damaged.
        CheckpointError: another version of this package wrote it.
        OSError: it cannot be read.
    """
    manifest = read_manifest(folder)
    if folder.name != folder_name(manifest.step):
        raise DamagedFileError(f"{folder / MANIFEST} is damaged: it is that of step {manifest.step}")
    experience = folder.parents[1] / EXPERIENCE
    sizes = {folder / name: file.size for name, file in manifest.files.items()}
    sizes |= {experience / f"{name}{SUFFIX}": size for name, size in manifest.experience.items()}
    for path, size in sizes.items():
        if not path.is_file():
            raise DamagedFileError(f"{path} is missing")
        if (now := path.stat().st_size) != size:
            raise DamagedFileError(f"{path} is damaged: it has {now} bytes and was written with {size}")
    return Checkpoint(folder, manifest)


def survey(run: Path) -> tuple[list[Checkpoint], list[str]]:
    """The complete checkpoints of a run, newest first, and what is wrong with its others."""
    found, problems = [], []
    for folder in folders(run):
        try:
            found.append(inspect(folder))
        except (DamagedFileError, CheckpointError, OSError) as error:
            problems.append(str(error))
    return found, problems


def find(run: Path) -> list[Checkpoint]:
    """The complete checkpoints of a run, newest first; checksums are not computed."""
    return survey(run)[0]
