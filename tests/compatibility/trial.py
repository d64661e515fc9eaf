"""One version is tried: in its environment, the imports and the tests."""

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

from packaging.version import Version

from exgrpo.train.errors import ExgrpoError
from tests.compatibility.counts import Counts, core, tests
from tests.compatibility.environment import EnvironmentFailed, overlay, whole
from tests.compatibility.promises import Target, project, requirements
from tests.compatibility.record import Entry
from tests.compatibility.suites import Package

ROOT = Path(__file__).parents[2]
LEFT_OUT = ("bench", "docs", "exgrpo", "vllm")
"""Of the groups and requirements, what an environment of another Python does without."""


class NotReached(ExgrpoError, RuntimeError):
    """A version cannot be had here."""


def counted(python: Path, package: Package) -> Counts:
    """The core and the tests of a package."""
    return core(python) + tests(python, package.tests)


def tried(target: Target, folder: Path, count: Callable[[Path, Package], Counts] = counted) -> Entry:
    """Try a version.

    Args:
        target: which.
        folder: for its environment; it is not there yet.
        count: what runs the tests.
    """
    entry = Entry(target.package.name, target.version, platform.python_version(), target.promised, target.ends)
    try:
        python = environment(target, folder)
    except (EnvironmentFailed, NotReached) as error:
        return replace(entry, not_tried=str(error))
    number = subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout.split()[-1]
    sites = map(str, folder.glob("lib/python*/site-packages"))
    there = sorted(f"{found.name}=={found.version}" for found in distributions(path=list(sites)))
    return replace(entry, python=number, companions=tuple(there), **asdict(count(python, target.package)))


def environment(target: Target, folder: Path) -> Path:
    """The Python of an environment with the version: this one, if it has it.

    Raises:
        EnvironmentFailed: pip cannot make it.
        NotReached: there is no such Python on PATH.
    """
    package, wanted = target.package, target.version
    if package.name == "python" and wanted != f"{sys.version_info.major}.{sys.version_info.minor}":
        if not (interpreter := shutil.which(f"python{wanted}")):
            raise NotReached(f"no python{wanted} on PATH")
        return whole(folder, interpreter, dependencies())
    if package.name == "python" or is_installed(package.installed, wanted):
        return Path(sys.executable)
    if package.listed:
        return overlay(folder, ("--no-deps", *listed(package, wanted)))
    return overlay(folder, (f"{package.installed}=={wanted}",))


def is_installed(name: str, wanted: str) -> bool:
    """Whether this environment has the version; a build of it has a local part, as in 2.13.0+cpu."""
    try:
        return Version(Version(version(name)).public) == Version(wanted)
    except PackageNotFoundError:
        return False


def listed(package: Package, wanted: str) -> list[str]:
    """The lines of a package's file, with this version of it."""
    lines = (ROOT / package.listed).read_text(encoding="utf-8").splitlines()
    pin = f"{package.installed}=="
    return [pin + wanted if line.startswith(pin) else line for line in lines if line and not line.startswith("#")]


def dependencies() -> list[str]:
    """What the package and its groups ask for, for an environment of another Python."""
    table = project()
    groups = {name: texts for name, texts in table["optional-dependencies"].items() if name not in LEFT_OUT}
    wanted = requirements({**table, "optional-dependencies": groups})
    return sorted({str(requirement) for requirement in wanted if requirement.name not in LEFT_OUT})
