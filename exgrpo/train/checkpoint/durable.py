"""Files that survive a loss of power, and a way to see that they did."""

import hashlib
import os
from pathlib import Path


class DamagedFileError(ValueError):
    """A file is missing or does not have the content it was written with; the message names it."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that its name stands for the old content or the whole new one, at whatever moment power fails."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    flush_folder(path.parent)


def flush_file(path: Path) -> None:
    """Force a file that was written by whatever means to disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Force the names of a folder's files to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content in hexadecimal; a file of any size takes little memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
