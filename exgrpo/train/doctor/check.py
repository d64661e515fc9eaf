"""What a check is, what it is given and what comes of it; the checks that there are.

A module of exgrpo.train.doctor.checks has its checks in the tuple CHECKS, and a new one needs no edit elsewhere. The
program imports all of these modules: at their tops they stay free of torch and of what imports it.
"""

import pkgutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

from exgrpo.train.config import Config
from exgrpo.train.errors import ExgrpoError

PACKAGE = "exgrpo.train.doctor.checks"
LOG = "log"
"""The file in the folder of a check that has all that its processes print."""


@dataclass(frozen=True, eq=False)
class Given:
    """What a check is given.

    Attributes:
        recipe: of the run that this machine is meant for.
        folder: an empty folder of the check's own, except for its log.
        resources: closes what the check opens.
    """

    recipe: Config
    folder: Path
    resources: ExitStack


@dataclass(frozen=True)
class Check:
    """A part that a run needs.

    Attributes:
        name: unique; an identifier.
        function: gives what it has measured as a sentence. It raises Skipped where the check cannot run on this
            machine, and any other exception where the part does not work. Its process unpickles it, so it is a
            function of a module, or a functools.partial of one.
        level: 0: the machine, 1: single parts, 2: parts together. A part that fails explains those above it.
        remedy: what to do where the function raises no ExgrpoError, which has a remedy of its own.
    """

    name: str
    function: Callable[[Given], str]
    level: Literal[0, 1, 2]
    remedy: str


class Skipped(Exception):
    """A check cannot run on this machine; the message says why."""


class CheckFailedError(ExgrpoError, RuntimeError):
    """A part does not work; the message says what was found and what to do."""


@dataclass(frozen=True)
class Finding:
    """What came of a check.

    Attributes:
        name: of the check.
        result: what it came to.
        text: what was measured, why it was skipped, or what is wrong and what to do.
        seconds: of its processes.
        output: the last lines of what they printed.
    """

    name: str
    result: Literal["ok", "failed", "skipped"]
    text: str
    seconds: float
    output: tuple[str, ...] = ()


def all_checks() -> list[Check]:
    """All checks, by their level and name."""
    modules = [module.name for module in pkgutil.iter_modules(import_module(PACKAGE).__path__)]
    checks = [check for module in modules for check in import_module(f"{PACKAGE}.{module}").CHECKS]
    return sorted(checks, key=lambda check: (check.level, check.name))
