"""One version is tried: in an environment of its own, the imports and the tests are counted."""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from exgrpo.train.common.errors import ExgrpoError
from tests.compatibility.promises import CORE, ROOT, UNCONSTRAINED, Package, Target, project, requirements
from tests.compatibility.record import Counts, Entry

LEFT_OUT = ("bench", "docs", "exgrpo", "vllm")
"""Of the groups and requirements, what an environment of another Python does without."""
LIMIT = 7200.0
"""Seconds in which the tests of one version have to end."""


class NotReached(ExgrpoError, RuntimeError):
    """A version cannot be had here; the message has the last line of pip, or what is missing."""


def tried(target: Target, folder: Path) -> Entry:
    """Try a version, in an environment in a folder that is not there yet."""
    entry = Entry(target.package.name, target.version, platform.python_version(), target.promised, target.ends)
    try:
        python = environment(target, folder)
    except NotReached as error:
        return replace(entry, not_tried=str(error))
    number = subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout.split()[-1]
    sites = map(str, folder.glob("lib/python*/site-packages"))
    there = sorted(f"{found.name}=={found.version}" for found in distributions(path=list(sites)))
    counts = tests(python, CORE) + tests(python, target.package.tests)
    return replace(entry, python=number, companions=tuple(there), **vars(counts))


def environment(target: Target, folder: Path) -> Path:
    """The Python of an environment with the version: this one, if it has it.

    Raises:
        NotReached: pip cannot make it, or there is no such Python on PATH.
    """
    package, wanted = target.package, target.version
    python = folder / "bin" / "python"
    if package.name == "python" and wanted != f"{sys.version_info.major}.{sys.version_info.minor}":
        if not (interpreter := shutil.which(f"python{wanted}")):
            raise NotReached(f"no python{wanted} on PATH")
        installed = sorted({str(requirement) for requirement in requirements(project(), LEFT_OUT)})
        run([interpreter, "-m", "venv", str(folder)])
        run([str(python), "-m", "pip", "install", "--no-cache-dir", *installed])  # the newest, as users have them
        return python
    if package.name == "python" or is_installed(package.installed, wanted):
        return Path(sys.executable)
    overlay(folder)
    install = ["--no-deps", *listed(package, wanted)] if package.listed else [f"{package.installed}=={wanted}"]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-cache-dir"]
    run([*pip, *install])
    if package.listed and (torch := torch_of(package, folder)):
        run([*pip, torch])
    copy_programs(Path(sys.executable).parent, folder / "bin")
    return python


def is_installed(name: str, wanted: str) -> bool:
    """Whether this environment has the version; a build of it has a local part, as in 2.13.0+cpu."""
    try:
        return Version(Version(version(name)).public) == Version(wanted)
    except PackageNotFoundError:
        return False


def overlay(folder: Path) -> None:
    """An environment on top of this one: what is installed into it comes first, the rest is this one's.

    pip finds the packages of this environment, so it installs nothing that fits, and leaves this one alone.
    """
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth file is searched, and the .pth files in it (an editable exgrpo has one) are not read.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")


def copy_programs(source: Path, folder: Path) -> None:
    """The programs of packages, for the Python of another folder, which tests start beside it."""
    for program in source.iterdir():
        if program.is_symlink() or program.is_dir() or (folder / program.name).exists():
            continue
        head, _, rest = program.read_bytes().partition(b"\n")
        if head.startswith(b"#!") and b"python" in head:
            (folder / program.name).write_bytes(f"#!{folder / 'python'}\n".encode() + rest)
            (folder / program.name).chmod(0o755)


def listed(package: Package, wanted: str) -> list[str]:
    """The lines of a package's file, with this version of it."""
    lines = (ROOT / package.listed).read_text(encoding="utf-8").splitlines()
    pin = f"{package.installed}=="
    return [pin + wanted if line.startswith(pin) else line for line in lines if line and not line.startswith("#")]


def torch_of(package: Package, folder: Path) -> str:
    """The torch that a package in a folder is built for, for pip; "": this environment has it."""
    (site,) = folder.glob("lib/python*/site-packages")
    (found,) = distributions(name=package.installed, path=[str(site)])
    needed = [need for text in found.requires or () if (need := Requirement(text)).name == "torch"]
    exact = [str(need.specifier) for need in needed if need.marker is None or need.marker.evaluate()]
    wanted = Version("".join(exact[:1]).removeprefix("==")).public
    return "" if is_installed("torch", wanted) else f"torch=={wanted}"


def run(command: list[str]) -> None:
    """Run a command of pip or venv.

    Raises:
        NotReached: it fails.
    """
    done = subprocess.run(command, env=UNCONSTRAINED, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise NotReached(errors[-1][:300] if errors else f"exit status {done.returncode}")


@cache  # packages of one environment share the core
def tests(python: Path, selection: tuple[str, ...]) -> Counts:
    """The counts of a selection of tests, which are arguments of pytest; none: nothing is counted."""
    if not selection:
        return Counts()
    begun, environment = time.monotonic(), {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(prefix="compatibility_tests_") as folder:
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={folder}/tmp", *selection]
        place: dict[str, Any] = {"cwd": ROOT, "env": environment, "timeout": LIMIT}
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, **place)
        except subprocess.TimeoutExpired:
            return Counts(failed=1, first_failure=f"the tests have not ended within {LIMIT:.0f} s")
    return replace(counted(done.stdout + done.stderr), seconds=round(time.monotonic() - begun, 1))


def counted(told: str) -> Counts:
    """The counts in what pytest tells at its end; of one that did not come to it, its last line is a failure."""
    lines = told.strip().splitlines() or ["it ended without a word"]
    (summary, *_) = [line for line in reversed(lines) if re.search(r"\d+ \w+.* in [\d.]+s", line)] or [""]
    found = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|skipped|error)", summary)}
    if not found:
        return Counts(failed=1, first_failure=shortened(lines[-1]))
    wrong = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    failed = found.get("failed", 0) + found.get("error", 0)
    return Counts(found.get("passed", 0), failed, found.get("skipped", 0), first_failure=shortened("".join(wrong[:1])))


def shortened(text: str) -> str:
    """A line of about 300 characters: its begin names the error, and its end has what a program said last."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:140]} ... {line[-155:]}"
