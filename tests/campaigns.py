"""What programs of many seeded cases share: a folder that one of them uses, and records behind which it goes on."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from exgrpo.train.common.durable import claim
from exgrpo.train.common.process import run_program
from exgrpo.train.config.command_line import options_of

R = TypeVar("R")


def records_of(path: Path, kind: Callable[..., R]) -> list[R]:
    """The records in a file of lines of JSON; none where it is not there."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [kind(**json.loads(line)) for line in lines]


def run_cases(options: type[Any], program: str, work: Callable[[Any, Console], int], argv: Sequence[str]) -> int:
    """Run such a program; returns its exit status, 1 where a case has a problem.

    Args:
        options: their model, with a `folder`.
        program: its name.
        work: does cases; returns how many have a problem.
        argv: the command line.
    """
    failed = 0

    def within(resources: ExitStack) -> None:
        nonlocal failed
        given = options_of(options, program, argv)
        given.folder.mkdir(parents=True, exist_ok=True)
        resources.enter_context(claim(given.folder))
        failed = work(given, Console())

    return run_program(within, "stopped: the same command goes on with the next case") or int(failed > 0)
