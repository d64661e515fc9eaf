"""Origin of results: code, packages, machine and date."""

import datetime
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
CODE = ("exgrpo", "recipes", "studies", ":!studies/results")
"""Paths whose changes may change results."""
PACKAGES = ("torch", "transformers", "deepspeed", "numpy")
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Origin:
    """Influences on a run's numbers other than its settings.

    Attributes:
        commit: commit of this project, with "+" appended if the files differ; "" without a repository.
        versions: versions of packages.
        processor: names of the processor and, after a comma, of the GPU if there is one.
    """

    commit: str
    versions: dict[str, str]
    processor: str

    @classmethod
    def here(cls) -> "Origin":
        """Return the origin of results computed now."""
        return cls(_commit(), {"python": platform.python_version(), **{p: version(p) for p in PACKAGES}}, _processor())


def today() -> str:
    """Return the date as YYYY-MM-DD."""
    return datetime.date.today().isoformat()


def _commit() -> str:
    try:
        named = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *CODE)
        return named + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", ROOT, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _processor() -> str:
    name = platform.processor() or platform.machine()
    if CPU_INFO.exists() and (found := re.search(r"^model name\s*:\s*(.+)$", CPU_INFO.read_text(), re.MULTILINE)):
        name = found[1]
    return f"{name}, {torch.cuda.get_device_name()}" if torch.cuda.is_available() else name
