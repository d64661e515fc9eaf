"""Files that survive a loss of power, a way to see that they did, and folders that one process at a time uses."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exgrpo.train.common.errors import ConfigError, os_errors_as

LOCK = "in_use_by"
"""The file in a folder that says which process holds it."""


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


def flush_tree(folder: Path) -> None:
    """Force all files under a folder to disk, and their names."""
    for path in (*folder.rglob("*"), folder):
        flush_folder(path) if path.is_dir() else flush_file(path)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content in hexadecimal; a file of any size takes little memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold a folder for this process, so that no second one writes into it.

    The system lets go of the lock when the process ends, however it ends; grading processes do not inherit it, as they
    would a lock of `flock`, which the package filelock takes.

    Raises:
        ConfigError: another process holds it, it cannot be written, or its file system has no locks.
    """
    with os_errors_as(ConfigError, f"{folder} cannot be written"):
        opened = (folder / LOCK).open("a+", encoding="utf-8", errors="replace")
    with opened as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # file systems answer one or the other
            file.seek(0)
            raise ConfigError(
                f"{folder} is in use by another process ({file.read().strip()}): wait for it or stop it first"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be locked against other processes ({error.strerror}): "
                "choose an output.folder on a file system that has locks"
            ) from None
        with os_errors_as(ConfigError, f"{folder} cannot be written"):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
            file.flush()
        yield
