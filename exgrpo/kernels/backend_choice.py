"""The order in which ``auto`` tries the backends: backend_choice.toml, measured, under a table of the user's own.

What calls are computed by is said on request (EXGRPO_DEBUG=1), or where it is not what it should be.
"""

import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from exgrpo.kernels.tables import Complaint, Table, Where, architecture, dtype_name

DEBUG = "EXGRPO_DEBUG"
SHIPPED = Path(__file__).with_name("backend_choice.toml")
CLASSES = ("small", "large")
LARGE = 1 << 20
"""Logits above which a call is large: below, it costs what its operators cost to launch."""
NAMES = ("torch", "triton", "cpu", "cuda")


def order(device: torch.device, operand: torch.dtype, logits: int) -> list[str]:
    """Backends for operands of a dtype and so many logits, the fastest first.

    Raises:
        ValueError: a table is malformed.
    """
    found: list[str] = TABLE.setting(architecture(device), dtype_name(operand), size_class(logits))["backends"]
    return found


def size_class(logits: int) -> str:
    """The class of calls with so many logits."""
    return "large" if logits > LARGE else "small"


def talkative() -> bool:
    """Whether the environment asks to be told what computes each kind of call."""
    return os.environ.get(DEBUG, "0") not in ("", "0")


@cache
def say(line: str) -> None:
    """Prints a line, the first time that it is said."""
    print(f"exgrpo: {line}", file=sys.stderr, flush=True)


def _check(where: Where, key: str, value: object) -> Iterator[Complaint]:
    if not isinstance(value, list) or not value or not all(name in NAMES for name in value):
        yield Complaint(key, f"it is {value!r}", f"a list of {', '.join(NAMES)}")


TABLE = Table("backend table", "EXGRPO_BACKEND_TABLE", SHIPPED, CLASSES, ("backends",), _check)
