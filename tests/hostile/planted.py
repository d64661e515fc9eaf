"""Defects that are there on purpose: a program that does not find them is blind."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.hostile.judge import TRACEBACK, Trial
from tests.hostile.values import Draw, Way

MIB = 2**20
_kept: list[bytearray] = []


DEFECTS: dict[str, tuple[Callable[[], object], str]] = {
    "sound": (lambda: None, ""),
    "hangs": (lambda: time.sleep(1000), "takes more than 2 s"),
    "exits": (lambda: os._exit(3), "ends the process"),
    "leaks": (lambda: _kept.append(bytearray(b"x" * (100 * MIB))), "leaves 100 MiB behind"),
    "takes": (lambda: bytearray(2**31), "a defect: .*MemoryError"),
    "traces": (lambda: print(TRACEBACK, file=sys.stderr, flush=True), "a traceback is printed"),
    "prints": (lambda: print("x" * (20 * MIB), flush=True), "bytes are printed"),
}
"""What is done, and how the program speaks of it."""


def _way(name: str) -> Way:
    def way(draw: Draw, folder: Path) -> Trial:
        return Trial(name, DEFECTS[name][0], "right")

    way.__name__ = name
    return way


WAYS = tuple(map(_way, DEFECTS))
