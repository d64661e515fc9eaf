"""Defects that are there on purpose: a program that does not find them is blind."""

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.hostile.judge import Trial

MIB = 2**20
_kept: list[bytearray] = []


def _leak() -> None:
    _kept.append(bytearray(b"x" * (100 * MIB)))


def _trace() -> None:
    print("Traceback (most recent call last)", file=sys.stderr, flush=True)


DEFECTS: dict[str, tuple[Callable[[], object], str]] = {
    "sound": (lambda: None, ""),
    "hangs": (lambda: time.sleep(1000), "takes more than 2 s"),
    "exits": (lambda: os._exit(3), "ends the process"),
    "leaks": (_leak, "leaves 100 MiB behind"),
    "takes": (lambda: bytearray(2**31), "a defect: .*MemoryError"),
    "traces": (
        lambda: print("Traceback (most recent call last)", file=sys.stderr, flush=True),
        "a traceback is printed",
    ),
    "prints": (lambda: print("x" * (20 * MIB), flush=True), "bytes are printed"),
}
"""What is done, and how the program speaks of it."""


def drawn(rng: random.Random, folder: Path) -> Trial:
    """That of the case's number, which is the end of the folder's name."""
    name = list(DEFECTS)[int(folder.name.split()[-1]) % len(DEFECTS)]
    return Trial(name, DEFECTS[name][0], "right")
