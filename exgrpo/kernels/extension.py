"""The compiled extension: the operators `torch.ops.exgrpo_C`."""

from pathlib import Path

import torch

from exgrpo.kernels.built import why_missing

FILE = Path(__file__).with_name("_C.abi3.so")


def load(file: Path) -> str:
    """Loads the operators; returns why that failed, empty if it did not."""
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
