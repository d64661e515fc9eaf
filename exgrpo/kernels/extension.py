"""The compiled operators `torch.ops.exgrpo_C`, and the reason why a compiled file is missing.

The reason stands in `build.json`, which setup.py writes.
"""

import json
import os
from importlib.metadata import distributions
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
"""The folder from which `exgrpo` is imported."""
AGAIN = "install exgrpo again by pip install --no-build-isolation"
FILE = Path(__file__).with_name("_C.abi3.so")
"""The operators for CPUs."""


def why_missing(file: Path, tools: str, root: Path = ROOT) -> str:
    """Return why a compiled file is not there, and what to do.

    Args:
        file: where it would be, below ``root``.
        tools: what it is built with.
        root: the folder that holds the package.
    """
    inside = os.path.relpath(file, root)
    # A program that is started in the source folder imports the package from there, whatever is installed.
    for distribution in distributions(name="exgrpo"):
        if Path(str(distribution.locate_file(inside))).exists():
            return (
                f"exgrpo is imported from {root}, which has no {file.name}, and the installed package in "
                f"{distribution.locate_file('')} has it; start Python in another folder, or use "
                "pip install --no-build-isolation --editable ."
            )
    record = root / "exgrpo" / "kernels" / "build.json"
    reason = json.loads(record.read_text(encoding="utf-8")).get(file.name) if record.exists() else ""
    if reason:
        return f"{file.name} was not built when exgrpo was installed: {reason}, then {AGAIN}"
    return f"{file.name} is not in {file.parent}; {AGAIN}, with {tools} present"


def load(file: Path) -> str:
    """Load the operators; return why that failed, "" if it did not."""
    if not file.exists():
        return why_missing(file, "torch and a C++ compiler")
    try:
        torch.ops.load_library(str(file))
    except OSError as error:
        return f"{file.name} cannot be loaded, install again: {error.__cause__ or error}"
    return ""


MISSING = load(FILE)
"""Why there are no compiled operators; empty where they are there."""

OPERATORS = torch.ops.exgrpo_C
