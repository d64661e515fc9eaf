"""List the checkpoints of a run, and read and check their manifests.

A manifest is a JSON file with the checksums of the checkpoint's files and of its own content.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from exgrpo.train.common.durable import SUFFIX, DamagedFileError, write_whole
from exgrpo.train.common.errors import CheckpointError

FOLDER, EXPERIENCE = "checkpoints", "experience"
UNFINISHED, DELETED, DAMAGED = ".unfinished", ".deleted", ".damaged"
"""Suffixes of folders that are being written, being deleted, or were found to be damaged."""
MANIFEST = "manifest.json"
FORMAT = 7
"""Version of the format, that of 0.1.0; lower ones were written before its release."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class SavedFile(_Strict):
    """Size in bytes and SHA-256 of a checkpoint's file."""

    size: NonNegativeInt
    sha256: str


class Manifest(_Strict):
    """Metadata of a checkpoint.

    Attributes:
        fingerprint: hash of the training questions.
        config: configuration of the run, plain values.
        files: sizes and checksums by path in the checkpoint's folder.
        arrays: name of the experience file with the trainer's arrays, stored answers among them.
        experience: size in bytes of each needed experience file, by name, which is its checksum.
        values: the trainer's plain values.
        progress: the caller's plain values.
    """

    step: NonNegativeInt
    fingerprint: str
    config: dict[str, Any]
    files: dict[str, SavedFile]
    arrays: str
    experience: dict[str, NonNegativeInt]
    values: dict[str, Any]
    progress: dict[str, Any]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest with the format's version and its checksum."""
    content = {"format": FORMAT, **manifest.model_dump()}
    write_whole(folder / MANIFEST, json.dumps({"sha256": _checksum(content), **content}).encode())


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest.

    Raises:
        DamagedFileError: it is missing, or its checksum is wrong.
        CheckpointError: it has another format.
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
    # Compare the bytes, too: other spellings of a number or a character have the same checksum.
    if checksum != _checksum(content) or json.dumps({"sha256": checksum, **content}) != text:
        raise DamagedFileError(f"{path} is damaged: its content is not what was written")
    version = content.pop("format", None)
    if version in range(FORMAT):
        raise CheckpointError(f"{folder} (format {version}) was written by an earlier copy of exgrpo: begin a new run")
    if version != FORMAT:
        raise CheckpointError(
            f"{folder} has format {version} and this version of exgrpo reads format {FORMAT}: "
            "continue with the version that wrote it"
        )
    return Manifest.model_validate(content)


def _checksum(content: Any) -> str:
    # JSON text that json.dumps wrote stays the same when it is parsed and dumped again.
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint with its manifest."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Last training step in it."""
        return self.manifest.step


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint folder."""
    return f"step_{step:08d}"


def folders(run: Path) -> list[Path]:
    """List the folders with names of checkpoints, newest first; raise OSError if that is not possible."""
    root = run / FOLDER
    names = os.listdir(root) if root.is_dir() else []
    return [root / name for name in sorted(names, reverse=True) if re.fullmatch(r"step_\d+", name)]


def inspect(folder: Path) -> Checkpoint:
    """Read a checkpoint's manifest and check the sizes of its files, but not their checksums.

    Raises:
        DamagedFileError: a file is missing or has another size, or the manifest is damaged.
        CheckpointError: another version of this package wrote it.
        OSError: it cannot be read.
    """
    manifest = read_manifest(folder)
    if folder.name != folder_name(manifest.step):
        raise DamagedFileError(f"{folder / MANIFEST} is damaged: it belongs to step {manifest.step}")
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
    """Return the complete checkpoints of a run, newest first, and the problems of the others."""
    found, problems = [], []
    for folder in folders(run):
        try:
            found.append(inspect(folder))
        except (DamagedFileError, CheckpointError, OSError) as error:
            problems.append(str(error))
    return found, problems


def find(run: Path) -> list[Checkpoint]:
    """Return the complete checkpoints of a run, newest first; checksums are not verified."""
    return survey(run)[0]
