"""What pyproject.toml promises, and the versions at the ends of it."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from exgrpo.train.errors import ConfigError
from tests.compatibility.environment import UNCONSTRAINED
from tests.compatibility.suites import Package

ROOT = Path(__file__).parents[2]


def project() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def requirements(table: dict[str, Any]) -> list[Requirement]:
    """All that the package and its groups ask for."""
    groups = table["optional-dependencies"].values()
    return [Requirement(text) for texts in (table["dependencies"], *groups) for text in texts]


def range_of(name: str, table: dict[str, Any]) -> SpecifierSet:
    """The versions that are promised of a package.

    Raises:
        ConfigError: pyproject.toml does not name it.
    """
    if name == "python":
        return SpecifierSet(table["requires-python"])
    for requirement in requirements(table):
        if requirement.name == name:
            return requirement.specifier
    raise ConfigError(f"pyproject.toml asks for no {name}: name one that it asks for")


def lowest(versions: SpecifierSet) -> Version:
    """The version that a range begins with."""
    return min(Version(part.version) for part in versions if part.operator in (">=", "=="))


@dataclass(frozen=True)
class Target:
    """A version to try, and the ends that it is: "oldest", "newest", "between", "latest" or "asked for"."""

    package: Package
    version: str
    promised: str
    ends: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str]:
        """That of its entry in a record."""
        return self.package.name, self.version


def targets(package: Package, promised: SpecifierSet, offered: Iterable[Version], ends: Iterable[str]) -> list[Target]:
    """The versions at the ends of a range, the oldest first; of Python all minor versions between them, too.

    Args:
        package: whose.
        promised: the range. Its oldest version is tried, whether it is offered or not.
        offered: the versions of the index.
        ends: those of "oldest", "newest" (of the range) and "latest" (of the index) that are wanted.
    """
    final = sorted(version for version in offered if not version.is_prerelease)
    inside = [version for version in final if version in promised]
    found = {"oldest": lowest(promised), "newest": max(inside, default=lowest(promised))}
    if final:
        found["latest"] = final[-1]
    wanted = [(version, end) for end, version in found.items() if end in ends]
    if package.name == "python" and {"oldest", "newest"} <= set(ends):
        wanted += [(version, "between") for version in inside if version not in found.values()]
    named: dict[Version, tuple[str, ...]] = {}
    for version, end in sorted(wanted, key=lambda pair: pair[0]):
        named[version] = (*named.get(version, ()), end)
    return [Target(package, str(version), str(promised), names) for version, names in named.items()]


def offered(package: Package, ask: Callable[[list[str]], str]) -> list[Version]:
    """The versions that the package index offers for this Python; of Python, minor versions without end.

    Args:
        package: which.
        ask: gives the standard output of a command.
    """
    if package.name == "python":
        return [Version(f"3.{minor}") for minor in range(8, 40)]
    told = ask([sys.executable, "-m", "pip", "index", "versions", package.installed])
    # Builds of other indexes have a local part ("+cpu"): those of the same version are one.
    return sorted({Version(Version(text).public) for text in re.findall(r"[\d.]+[\w.+]*", versions_line(told))})


def versions_line(told: str) -> str:
    """Of what pip tells, the list of versions."""
    found = re.search(r"^Available versions: (.*)$", told, re.MULTILINE)
    return found[1] if found else ""


def ask(command: list[str]) -> str:
    """The standard output of a command; empty where it fails."""
    return subprocess.run(command, env=UNCONSTRAINED, capture_output=True, text=True, check=False).stdout
