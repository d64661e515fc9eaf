"""Crash-safe files, arrays in files named by their checksum, and folders locked for one process at a time."""

import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from exgrpo.train.common.errors import ConfigError, os_errors_as

LOCK = "in_use_by"
"""Lock file in a folder; it names the process that holds it."""
SUFFIX = ".safetensors"
"""Of the files of `write_checked`."""


class DamagedFileError(ValueError):
    """A file is missing or differs from what was written; the message names it."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: after a power failure it has either its old or its new content."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Force the content of a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Force all files under a folder, and their names, to disk."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, reading it in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checked(folder: Path, arrays: Mapping[str, npt.NDArray]) -> str:
    """Write arrays to a file that is named by its SHA-256, whole or not at all, and return that name."""
    temporary = folder / "unnamed.tmp"
    try:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    flush(temporary)
    name = sha256(temporary)
    temporary.replace(folder / f"{name}{SUFFIX}")
    flush(folder)
    return name


def read_checked(folder: Path, name: str) -> dict[str, npt.NDArray]:
    """Read what `write_checked` wrote; raise DamagedFileError if it is missing or has changed."""
    path = folder / f"{name}{SUFFIX}"
    if not path.is_file():
        raise DamagedFileError(f"{path} is missing")
    if sha256(path) != name:
        raise DamagedFileError(f"{path} is damaged: its content does not have the checksum in its name")
    return load_file(path)


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Lock a folder for this process, so that no second one writes into it.

    The system releases the lock when the process ends, however it ends. Grading processes do not inherit it, unlike a
    lock by `flock`, which the package filelock uses.

    Raises:
        ConfigError: another process holds it, it is not writable, or its file system has no locks.
    """
    with os_errors_as(ConfigError, f"{folder} cannot be written"):
        opened = (folder / LOCK).open("a+", encoding="utf-8", errors="replace")
    with opened as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # depends on the file system
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
