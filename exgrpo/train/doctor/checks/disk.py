"""How fast does the file system of the results take a checkpoint to disk?"""

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from exgrpo.train.doctor.check import Check, Given
from exgrpo.train.errors import ConfigError, os_errors_as
from exgrpo.train.estimate.parts import GIB

MIB = 1 << 20
BLOCK, BLOCKS = 16 * MIB, 16
FLUSHES = 20


def check(given: Given) -> str:
    """Write files without a name: whatever happens, none stays."""
    folder = place_of(given.recipe.output.folder)
    with os_errors_as(
        ConfigError, f"output.folder: {given.recipe.output.folder} cannot be written; choose another one"
    ):
        rate, flush = writing_rate(folder), flush_seconds(folder)
        free = shutil.disk_usage(folder).free
    return f"{rate / MIB:.0f} MiB/s with fsync, a small fsync takes {flush * 1e3:.1f} ms, {free / GIB:.1f} GiB free"


def place_of(folder: Path) -> Path:
    """The folder, or that of its parents in which it would be made."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())


def writing_rate(folder: Path) -> float:
    """Bytes per second of one file of 256 MiB that is forced to disk. Its content cannot be compressed."""
    block = os.urandom(BLOCK)
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        for _ in range(BLOCKS):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return BLOCK * BLOCKS / (time.perf_counter() - start)


def flush_seconds(folder: Path) -> float:
    """Median seconds to force a small change of a file to disk."""
    seconds = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(FLUSHES):
            start = time.perf_counter()
            file.write(b"0" * 4096)
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


CHECKS = (Check("disk", check, 0, "The file system of output.folder hangs or is broken: choose another output.folder"),)
