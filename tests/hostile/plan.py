"""The plan: which trial a case is follows from the seed and its number; those that once found a defect come first."""

import random
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path

from tests.hostile.judge import Trial

SHARES = {
    "recipes": 240,
    "command_lines": 160,
    "rows": 250,
    "rewards": 30,
    "models": 90,
    "answers": 90,
    "kernels": 138,
    "programs": 2,
}
"""Of 1000 cases; a case of a reward needs processes, and one of a program starts it."""
KNOWN = "known"
Draw = Callable[[random.Random, Path], Trial]


def kept() -> dict[str, Callable[[Path], Trial]]:
    """The cases that once found a defect, by name."""
    return import_module("tests.hostile.known").CASES


def is_kept(number: int, kinds: Collection[str]) -> bool:
    """Whether a case is one of those; a plan of kinds that are not the program's own has none."""
    return bool(SHARES.keys() & set(kinds)) and number < len(kept())


def kind_of(seed: int, number: int, kinds: Collection[str]) -> str:
    """The kind of a case: its module."""
    names = [name for name in SHARES if name in kinds] or sorted(kinds)
    return random.Random(f"{seed} {number} kind").choices(names, [SHARES.get(name, 1) for name in names])[0]


def planned(seed: int, number: int, folder: Path, kinds: Collection[str] = tuple(SHARES)) -> tuple[str, Trial]:
    """The kind and the trial of a case.

    Args:
        seed: of the plan.
        number: of the case, from 0.
        folder: an empty one for its files.
        kinds: those of the plan.
    """
    if is_kept(number, kinds):
        return KNOWN, list(kept().values())[number](folder)
    kind = kind_of(seed, number, kinds)
    draw: Draw = import_module(f"tests.hostile.{kind}").drawn
    return kind, draw(random.Random(f"{seed} {number}"), folder)
