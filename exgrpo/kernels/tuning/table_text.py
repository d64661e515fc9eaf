"""Tables as they are written: what `tables` reads, with comments that say where the numbers come from."""

import datetime
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

Sections = dict[tuple[str, str, str], tuple[dict[str, Any], list[str]]]
"""Entries of a table by architecture, dtype and class, with notes about them."""


def text(sections: Sections, header: Sequence[str]) -> str:
    """A table: the settings of each section, and what was noted about it as comments."""
    lines = [f"# {line}" for line in header]
    for name, (entry, notes) in sections.items():
        lines += ["", *(f"# {note}" for note in notes), f"[{'.'.join(name)}]"]
        lines += [f"{key} = {toml(value)}" for key, value in entry.items()]
    return "\n".join(lines) + "\n"


def toml(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {toml(part)}' for key, part in value.items())} }}"
    return json.dumps(value)


def origin(device: torch.device, architecture: str) -> list[str]:
    """Where and when something was timed."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    runtime = torch.version.hip or torch.version.cuda or "none"
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    versions = f"torch {torch.__version__}, triton {triton}, CUDA or HIP {runtime}"
    return [f"Timed on {name} ({architecture}), {datetime.date.today()}.", f"{versions}."]
