"""Where results come from: the code, the packages, the machine, the day."""

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
"""Where a change may change what runs come to."""
PACKAGES = ("torch", "transformers", "deepspeed", "numpy")
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Origin:
    """What may change the numbers of a run besides its settings.

    Attributes:
        commit: of this project; with "+" behind it if the files differ from it; "" where there is no repository.
        versions: of packages.
        processor: its name, and behind a comma that of the GPU if there is one.
    """

    commit: str
    versions: dict[str, str]
    processor: str

    @classmethod
    def here(cls) -> "Origin":
        """Of what runs now."""
        return cls(_commit(), {"python": platform.python_version(), **{p: version(p) for p in PACKAGES}}, _processor())


def today() -> str:
    """YYYY-MM-DD."""
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
