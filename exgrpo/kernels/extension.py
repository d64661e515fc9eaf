"""The compiled extension: the operators `torch.ops.exgrpo_C`."""

from pathlib import Path

import torch

FILE = Path(__file__).with_name("_C.abi3.so")


def load(file: Path) -> str:
    """Loads the operators; returns why that failed, empty if it did not."""
    if not file.exists():
        return (
            f"{file.name} was not built; install again with a C++ compiler and torch present, "
            "by pip install --no-build-isolation"
        )
    try:
        torch.ops.load_library(str(file))
    except OSError as error:
        return f"{file.name} cannot be loaded, install again: {error.__cause__ or error}"
    return ""


MISSING = load(FILE)
"""Why there are no compiled operators; empty where they are there."""

OPERATORS = torch.ops.exgrpo_C
