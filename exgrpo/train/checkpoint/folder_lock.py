"""One process at a time writes into a results folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exgrpo.train.errors import ConfigError, os_errors_as

LOCK = "in_use_by"


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold a folder for this process, so that no second one writes into it.

    The system lets go of the lock when the process ends, however it ends; grading processes do not inherit it.

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
