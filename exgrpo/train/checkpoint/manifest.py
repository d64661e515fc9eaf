"""What a checkpoint says of itself: a JSON file that carries the checksums of its files and of its own content."""

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from exgrpo.train.checkpoint.durable import DamagedFileError, write_whole
from exgrpo.train.errors import CheckpointError
from exgrpo.train.section import joined

MANIFEST = "manifest.json"
FORMAT = 5
"""Version of the format; 1 had neither a number nor checksums, 2 did not count replays, 3 kept no origin of answers, 4
was for one number of processes."""
_KEYS_OF_FORMAT_1 = {"step", "files", "arrays", "segments", "values", "progress"}


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
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path} is damaged: it is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise DamagedFileError(f"{path} is damaged: it is no JSON object")
    if content.keys() >= _KEYS_OF_FORMAT_1 and not content.keys() & {"format", "sha256"}:
        raise CheckpointError(
            f"{folder} was written by an earlier version of exgrpo, without checksums, and cannot be verified: "
            "continue with that version, or start a new run"
        )
    written = json.dumps(content) == text  # a number or a character may have another spelling, of the same checksum
    if content.pop("sha256", None) != _checksum(content) or not written:
        raise DamagedFileError(f"{path} is damaged: its content does not have the checksum that it carries")
    version = content.pop("format", None)
    if version != FORMAT:
        raise CheckpointError(
            f"{folder} has format {version} and this version of exgrpo reads format {FORMAT}: "
            "continue with the version that wrote it"
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        keys = dict.fromkeys(joined(problem["loc"]) for problem in error.errors())
        raise DamagedFileError(f"{path} is damaged: {', '.join(keys)} cannot be as it says") from None


def _checksum(content: dict[str, Any]) -> str:
    """Of the JSON text, which reading and writing again does not change."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
