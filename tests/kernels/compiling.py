"""Kernels compiled ahead of time for two architectures, and what their machine code shows.

Not to be imported where TRITON_INTERPRET is set: such a process can only interpret kernels, not compile them.
"""

import re
from tempfile import NamedTemporaryFile

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.programs import printed

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32)}
SHARED_LIMIT = 227 << 10  # bytes a program may have


def architectures():
    """Values of a parametrisation: to compile for others than Hopper takes minutes."""
    return [name if name == "sm_90" else pytest.param(name, marks=pytest.mark.long) for name in TARGETS]


class Machine:
    """A compiled kernel: its assembler, and what it takes of the machine."""

    def __init__(self, kernel):
        self.shared = kernel.metadata.shared
        self.code = kernel.asm["ptx"]
        self.spilled = stack(kernel.asm["cubin"])


def stack(cubin):
    """Bytes that a thread keeps in memory: the registers that did not fit, since the kernels have no arrays."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = printed(triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
    return sum(int(number) for number in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))


def compile_kernel(architecture, kernel, types, constants, *, unaligned=(), **options):
    """A kernel as it is compiled at run time.

    ``types`` has the type of each argument that is not in ``constants`` ("*bf16", "i32"). 16 divides all pointers and
    integers but the ``unaligned``. ``options``: num_warps, num_stages.
    """
    signature, attributes = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        signature[argument] = kind = types[argument]
        attributes[index,] = []
        if argument not in unaligned and kind.startswith(("*", "i")):
            attributes[index,].append(["tt.divisibility", 16])
    source = ASTSource(kernel, signature, dict(constants), attributes)
    return Machine(triton.compile(source, target=TARGETS[architecture], options=options))


def assert_runs_well(machine, *, spilling=False):
    assert spilling or machine.spilled == 0
    assert machine.shared <= SHARED_LIMIT
    assert not re.search(r"\b(?:atom|red)\.", machine.code)  # they would add in an order that differs from run to run


def assert_shows_nan(machine):
    """A GPU's plain maximum of NaN and a number is the number; the interpreter's is NaN, so no result shows it."""
    assert not re.search(r"\b(?:max|min)\.f32", machine.code)


def name(value):
    """Return the name of a part of a case, for the test's id."""
    if isinstance(value, dict):
        return "+".join(key if on is True else f"{key}={on}" for key, on in value.items() if on is not False) or "-"
    return getattr(value, "__name__", str(value))
