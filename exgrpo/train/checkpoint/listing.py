"""Which checkpoints a run has, what each says of itself, and what is wrong with some of them at first sight.

A checkpoint's manifest is a JSON file that carries the checksums of its files and of its own content.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from exgrpo.train.checkpoint.store import SUFFIX
from exgrpo.train.common.durable import DamagedFileError, write_whole
from exgrpo.train.common.errors import CheckpointError

FOLDER, EXPERIENCE = "checkpoints", "experience"
UNFINISHED, DELETED, DAMAGED = ".unfinished", ".deleted", ".damaged"
"""End the names of folders that are no checkpoints yet, none any more, and of such as were set aside."""
MANIFEST = "manifest.json"
FORMAT, READ = 6, (5, 6)
"""Version of the format that is written, and those that are read; 5 is that of 0.1.0."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class SavedFile(_Strict):
    """A file of a checkpoint: its size in bytes and the SHA-256 of its content."""

    size: NonNegativeInt
    sha256: str


class Manifest(_Strict):
    """Everything about a checkpoint but the content of its files."""

    step: NonNegativeInt
    """The last training step that is in it."""
    fingerprint: str
    """Of the training questions."""
    config: dict[str, Any]
    """The configuration of the run, plain values."""
    files: dict[str, SavedFile]
    """By path in the checkpoint's folder."""
    arrays: str
    """The experience file with the trainer's arrays and the index of its trajectories."""
    experience: dict[str, NonNegativeInt]
    """Size in bytes of each experience file that is needed, by name (the name is the checksum of the content)."""
    values: dict[str, Any]
    """The trainer's plain values."""
    progress: dict[str, Any]
    """The caller's plain values."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest with its format and its checksum."""
    content = {"format": FORMAT, **manifest.model_dump()}
    write_whole(folder / MANIFEST, json.dumps({"sha256": _checksum(content), **content}).encode())


def read_manifest(folder: Path) -> Manifest:
    """Read what `write_manifest` wrote.

    Raises:
        DamagedFileError: it is missing, or its content is not what was written.
        CheckpointError: another version of this package wrote it.
        OSError: it cannot be read.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except FileNotFoundError:
        raise DamagedFileError(f"{path} is missing") from None
    except (ValueError, RecursionError):
        text, content = "", None
    checksum = content.pop("sha256", None) if isinstance(content, dict) else None
    # To the byte: a number or a character may have another spelling, of the same checksum.
    if checksum != _checksum(content) or json.dumps({"sha256": checksum, **content}) != text:
        raise DamagedFileError(f"{path} is damaged: its content is not what was written")
    version = content.pop("format", None)
    if version not in READ:
        raise CheckpointError(
            f"{folder} has format {version} and this version of exgrpo reads format {FORMAT}: "
            "continue with the version that wrote it"
        )
    return Manifest.model_validate(content)


def _checksum(content: Any) -> str:
    """Of the JSON text, which reading and writing again does not change."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


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
