"""An environment with one package in another version, and one of another Python."""

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from pathlib import Path

from exgrpo.train.errors import ExgrpoError

ROOT = Path(__file__).parents[2]
UNCONSTRAINED = {**os.environ, "PIP_CONSTRAINT": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
"""A machine's own constraints may exclude an end of a range."""


class EnvironmentFailed(ExgrpoError, RuntimeError):
    """An environment cannot be made; the message has pip's last line."""


def overlay(folder: Path, install: Iterable[str]) -> Path:
    """An environment on top of this one: what is installed into it comes first, the rest is this one's.

    pip finds the packages of this environment, so it installs nothing that fits, and leaves this one alone.

    Args:
        folder: a new one.
        install: arguments of `pip install`; none: the environment is this one.

    Returns:
        Its Python.

    Raises:
        EnvironmentFailed: pip finds or installs it not.
    """
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    mine = sysconfig.get_path("purelib")
    # A path in a .pth file is searched, and the .pth files in it (an editable exgrpo has one) are not read.
    (site / "others.pth").write_text(mine + "\n")
    python = folder / "bin" / "python"
    if arguments := list(install):
        run([sys.executable, "-m", "pip", "--python", str(python), "install", "--no-cache-dir", *arguments])
    copy_programs(Path(sys.executable).parent, folder / "bin")
    return python


def copy_programs(source: Path, folder: Path) -> None:
    """The programs of packages, for the Python of another folder, which tests start beside it."""
    for program in source.iterdir():
        if program.is_symlink() or program.is_dir() or (folder / program.name).exists():
            continue
        head, _, rest = program.read_bytes().partition(b"\n")
        if head.startswith(b"#!") and b"python" in head:
            (folder / program.name).write_bytes(f"#!{folder / 'python'}\n".encode() + rest)
            (folder / program.name).chmod(0o755)


def whole(folder: Path, interpreter: str, install: Iterable[str]) -> Path:
    """An environment of another Python, with nothing of this one.

    Args:
        folder: a new one.
        interpreter: the program.
        install: requirements; constraints.txt says their versions.

    Returns:
        Its Python.

    Raises:
        EnvironmentFailed: pip finds or installs something not.
    """
    run([interpreter, "-m", "venv", str(folder)])
    python = folder / "bin" / "python"
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    run([str(python), "-m", "pip", "install", "--no-cache-dir", *constraints, *install])
    return python


def run(command: list[str]) -> None:
    """Run a command of pip or venv.

    Raises:
        EnvironmentFailed: it fails.
    """
    done = subprocess.run(command, env=UNCONSTRAINED, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise EnvironmentFailed(errors[-1][:300] if errors else f"exit status {done.returncode}")
