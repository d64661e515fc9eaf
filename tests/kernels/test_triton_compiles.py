"""The Triton kernels compiled ahead of time for every architecture of the launch table: it needs no GPU.

What the machine code shows is what decides the speed of kernels that read each logit once: spilled registers, the
width of the loads. The launch table was chosen by it.
"""

import os
import re
import subprocess
from functools import cache
from itertools import product
from tempfile import NamedTemporaryFile

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("with TRITON_INTERPRET a process can only interpret kernels, not compile them", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from exgrpo.kernels.triton_chunks import launch as launching
from exgrpo.kernels.triton_chunks.kernels import gradient_kernel, statistics_kernel

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
ITEMSIZE = {"fp32": 4, "fp64": 8}
VECTOR = 16  # bytes of the widest load that all architectures have

# What TritonRows asks for: the logits' dtype, out's, the bias's (None: there is none), and the switches. F goes into
# bf16 where the operands have it; the bias may be fp32 then too, under autocast. WRITE and PLAIN exclude a softcap.
# With GIVEN there is one reading instead of three, without it every bias is tried.
STATISTICS = [
    ("fp32", "bf16" if write else "fp32", bias, {"HAS_SOFTCAP": softcap, "GIVEN": given, "WRITE": write})
    for (bias, given), (softcap, write) in product(
        ((None, False), ("bf16", False), ("fp32", False), (None, True)),
        ((False, False), (False, True), (True, False)),
    )
]
STATISTICS += [("fp64", "fp64", "fp64", {"HAS_SOFTCAP": True, "GIVEN": False, "WRITE": False})]
GRADIENT = [
    ("fp32", out, bias, {"HAS_SOFTCAP": softcap, "PLAIN": plain})
    for (out, bias), (softcap, plain) in product(
        (("bf16", None), ("bf16", "bf16"), ("fp32", "fp32")), ((False, True), (False, False), (True, False))
    )
]
GRADIENT += [("fp64", "fp64", "fp64", {"HAS_SOFTCAP": False, "PLAIN": False})]
CASES = [(statistics_kernel, *case) for case in STATISTICS] + [(gradient_kernel, *case) for case in GRADIENT]


def name(value):
    """Of a part of a case, in the test's id."""
    if isinstance(value, dict):
        return "+".join(switch for switch, on in value.items() if on) or "none"
    return getattr(value, "__name__", str(value))


class Machine:
    """A compiled kernel: its loads, and what it takes of the machine.

    Loads are counted in the assembler; the disassembled machine code has the same, and takes a while to get.
    """

    def __init__(self, architecture, kernel):
        self.shared = kernel.metadata.shared
        if architecture.startswith("gfx"):
            self.code = kernel.asm["amdgcn"]
            self.spilled = sum(
                int(number)
                for number in re.findall(r"\.(?:[sv]gpr_spill_count|private_segment_fixed_size):\s+(\d+)", self.code)
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


@cache
def compiled(architecture, kernel, logits, out, bias, switches, block, aligned=True):
    """A kernel as it is compiled at run time; ``aligned``: 16 divides the vocabulary."""
    constants = {**dict(switches), "HAS_BIAS": bias is not None, "BLOCK": block}
    dtypes = {"target": "i64", "out": out, "bias": bias or logits}
    signature, attributes = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        number = argument in ("vocabulary", "stride")
        signature[argument] = "i32" if number else "*" + dtypes.get(argument, logits)
        if aligned or not number:
            attributes[index,] = [["tt.divisibility", 16]]
        if architecture.startswith("gfx") and not number:  # a chunk has less than 2 GiB
            attributes[index,].append(["tt.pointer_range", 32])
    source = ASTSource(kernel, signature, constants, attributes)
    warps = launching.BY_ARCHITECTURE[architecture].warps
    return Machine(architecture, triton.compile(source, target=TARGETS[architecture], options={"num_warps": warps}))


def assert_runs_well(architecture, machine):
    assert machine.spilled == 0
    assert machine.shared <= SHARED_LIMIT[architecture]
    assert not machine.atomics  # they would add in an order that differs from run to run


def test_every_architecture_of_the_table_is_compiled_for():
    assert TARGETS.keys() == launching.BY_ARCHITECTURE.keys()


@pytest.mark.parametrize("architecture", TARGETS)
@pytest.mark.parametrize(("kernel", "logits", "out", "bias", "switches"), CASES, ids=name)
def test_kernels_do_not_spill_and_load_whole_vectors(architecture, kernel, logits, out, bias, switches):
    """Nothing but the numbers of a row, one load an argument, is read by less than 128 bits."""
    chosen = launching.BY_ARCHITECTURE[architecture]
    machine = compiled(architecture, kernel, logits, out, bias, tuple(switches.items()), chosen.block)
    assert_runs_well(architecture, machine)
    threads = chosen.warps * TARGETS[architecture].warp_size
    readings = 3 if switches.get("GIVEN") is False else 1  # anchored at the target; the largest; anchored there
    assert machine.wide >= readings * chosen.block * ITEMSIZE[logits] // (VECTOR * threads)
    assert machine.narrow <= len(kernel.arg_names)


@pytest.mark.parametrize("architecture", TARGETS)
@pytest.mark.parametrize(
    ("kernel", "out", "switches"),
    [
        (statistics_kernel, "bf16", {"HAS_SOFTCAP": False, "GIVEN": False, "WRITE": True}),
        (gradient_kernel, "bf16", {"HAS_SOFTCAP": True, "PLAIN": False}),
    ],
    ids=name,
)
def test_vocabularies_that_16_does_not_divide_do_not_spill(architecture, kernel, out, switches):
    """Their rows start anywhere: loads are narrow and need more registers."""
    block = launching.BY_ARCHITECTURE[architecture].block
    machine = compiled(architecture, kernel, "fp32", out, "bf16", tuple(switches.items()), block, aligned=False)
    assert_runs_well(architecture, machine)


@pytest.mark.parametrize("architecture", TARGETS)
def test_blocks_smaller_than_a_program_compile(architecture):
    """A small vocabulary leaves some threads without a column of their own."""
    switches = (("HAS_SOFTCAP", False), ("GIVEN", False), ("WRITE", True))
    machine = compiled(architecture, statistics_kernel, "fp32", "bf16", "bf16", switches, 128, aligned=False)
    assert_runs_well(architecture, machine)


@pytest.mark.parametrize("architecture", [name for name in TARGETS if name.startswith("sm")])
@pytest.mark.parametrize(
    ("kernel", "out", "switches"),
    [(statistics_kernel, "fp32", {"GIVEN": True, "WRITE": False}), (gradient_kernel, "bf16", {"PLAIN": False})],
    ids=name,
)
def test_a_broken_logit_is_not_taken_for_an_impossible_word(architecture, kernel, out, switches):
    """A GPU's plain maximum of NaN and a number is the number; the interpreter's is NaN, so no result shows it."""
    block = launching.BY_ARCHITECTURE[architecture].block
    case = (("HAS_SOFTCAP", False), *switches.items())
    ptx = compiled(architecture, kernel, "fp32", out, None, case, block).code
    assert "max.NaN.f32" in ptx
    assert "max.f32" not in ptx


@pytest.mark.parametrize("architecture", [*TARGETS, "sm_75", "gfx1100"])
@pytest.mark.parametrize(
    ("vocabulary", "fitting"), [(1, 128), (5, 128), (128, 128), (129, 256), (32000, 32768), (151936, 262144)]
)
def test_blocks_are_powers_of_two_that_fit_the_vocabulary(architecture, vocabulary, fitting, monkeypatch):
    """An unknown GPU gets the entry that is safe on any."""
    monkeypatch.setattr(launching, "architecture", lambda device: architecture)
    chosen = launching.BY_ARCHITECTURE.get(architecture, launching.SAFE)
    launching.launch.cache_clear()
    try:
        found = launching.launch(torch.device("cuda"), vocabulary)
    finally:
        launching.launch.cache_clear()
    assert found == launching.Launch(min(fitting, chosen.block), chosen.warps)
    assert found.block & (found.block - 1) == 0
    assert 128 <= found.block <= chosen.block
    assert (architecture in TARGETS) == (chosen is not launching.SAFE)
