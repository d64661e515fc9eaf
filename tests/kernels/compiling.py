"""Kernels compiled ahead of time for the architectures of the launch table, and what their machine code shows.

Not to be imported where TRITON_INTERPRET is set: such a process can only interpret kernels, not compile them.
"""

import re
import subprocess
from tempfile import NamedTemporaryFile

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {  # bytes a program may have
    "sm_80": 163 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx942": 64 << 10,
}


def architectures(wanted=lambda name: True):
    """Values of a parametrisation: to compile for others than Hopper takes minutes."""
    names = [name for name in TARGETS if wanted(name)]
    return [name if name == "sm_90" else pytest.param(name, marks=pytest.mark.long) for name in names]


class Machine:
    """A compiled kernel: its loads, and what it takes of the machine.

    Loads are counted in the assembler; the disassembled machine code has the same, and takes a while to get.
    """

    def __init__(self, architecture, kernel):
        self.shared = kernel.metadata.shared
        if architecture.startswith("gfx"):
            self.code = kernel.asm["amdgcn"]
            self.spilled = sum(
                # Scalar registers are spilled to lanes of vector ones, not to memory.
                int(number)
                for number in re.findall(r"\.(?:vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", self.code)
            )
            loads = re.findall(r"(?:global|buffer)_load_(\w+)", self.code)
            self.wide = loads.count("dwordx4")
            self.atomics = re.findall(r"\w*_atomic_\w*", self.code)
        else:
            self.code = kernel.asm["ptx"]
            self.spilled = stack(kernel.asm["cubin"])
            loads = re.findall(r"\bld\.global\S*", self.code)
            self.wide = len([load for load in loads if load.endswith(("v4.b32", "v2.b64"))])
            self.atomics = re.findall(r"\b(?:atom|red)\.\S*", self.code)
        self.narrow = len(loads) - self.wide


def stack(cubin):
    """Bytes that a thread keeps in memory: the registers that did not fit, since the kernels have no arrays."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return sum(int(number) for number in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))


def compile_kernel(architecture, kernel, types, constants, *, unaligned=(), large=(), **options):
    """A kernel as it is compiled at run time.

    ``types`` has the type of each argument that is not in ``constants`` ("*bf16", "i32"). 16 divides all pointers and
    integers but the ``unaligned``; tensors have less than 2 GiB but the ``large``. ``options``: num_warps, num_stages.
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
        if architecture.startswith("gfx") and kind.startswith("*") and argument not in large:
            attributes[index,].append(["tt.pointer_range", 32])
    source = ASTSource(kernel, signature, dict(constants), attributes)
    return Machine(architecture, triton.compile(source, target=TARGETS[architecture], options=options))


def assert_runs_well(architecture, machine):
    assert machine.spilled == 0
    assert machine.shared <= SHARED_LIMIT[architecture]
    assert not machine.atomics  # they would add in an order that differs from run to run


def name(value):
    """Return the name of a part of a case, for the test's id."""
    if isinstance(value, dict):
        return "+".join(key if on is True else f"{key}={on}" for key, on in value.items() if on is not False) or "-"
    return getattr(value, "__name__", str(value))
