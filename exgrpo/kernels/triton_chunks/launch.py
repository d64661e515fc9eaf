"""How the row kernels are launched: columns per step and warps, by architecture.

The entries for a real architecture were chosen so that every kernel compiles without register spills; none was timed.
"""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Launch:
    """Of a kernel with one program per row.

    Attributes:
        block: columns that are worked on at once.
        warps: of a program.
    """

    block: int
    warps: int


SAFE = Launch(block=2048, warps=8)
BY_ARCHITECTURE: dict[str, Launch] = {
    "sm_80": Launch(block=4096, warps=8),
    "sm_90": Launch(block=4096, warps=8),
    "sm_100": Launch(block=4096, warps=8),
    "sm_120": Launch(block=4096, warps=8),
    "gfx942": Launch(block=2048, warps=8),
}


@cache
def launch(device: torch.device, vocabulary: int) -> Launch:
    """For rows of ``vocabulary`` columns; an unknown GPU gets SAFE."""
    chosen = BY_ARCHITECTURE.get(architecture(device), SAFE)
    fitting = max(128, 1 << (vocabulary - 1).bit_length()) if vocabulary > 1 else 128
    return Launch(min(chosen.block, fitting), chosen.warps)


def architecture(device: torch.device) -> str:
    """The name of a GPU's architecture; "cpu" for the interpreter."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
