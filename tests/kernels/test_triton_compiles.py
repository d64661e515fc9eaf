"""The Triton kernels compiled ahead of time for Hopper and Blackwell: it needs no GPU.

What the machine code shows is what decides the speed of kernels that read each logit once: spilled registers, the
width of the loads. The launch plans were chosen by it.
"""

import re
from functools import cache

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from exgrpo.kernels.triton_chunks import launch as launching
from exgrpo.kernels.triton_chunks import token_kernels, triton_allowed, triton_tokens
from exgrpo.kernels.triton_chunks.allowed_kernels import (
    allowed_gradient_kernel,
    allowed_sums_kernel,
    pair_logits_kernel,
    pairs_kernel,
    segment_kernel,
)
from exgrpo.kernels.triton_chunks.fused_kernels import (
    anchor_kernel,
    exponentials_kernel,
    largest_kernel,
    list_kernel,
    merge_kernel,
    target_logit_kernel,
)
from exgrpo.kernels.triton_chunks.fused_product import LISTED, MERGED, half_tile, traits
from exgrpo.kernels.triton_chunks.row_kernels import gradient_kernel, listed_largest_kernel, statistics_kernel

from .compiling import SHARED_LIMIT, TARGETS, architectures, assert_runs_well, compile_kernel, name

ITEMSIZE = {"fp32": 4, "fp64": 8}
VECTOR = 16  # bytes of the widest load

# What TritonPasses asks for: the logits' dtype, out's, the bias's (None: there is none), and the switches. F goes into
# bf16 where the operands have it; the bias may be fp32 then too, under autocast. WRITE and PLAIN exclude a softcap.
# With given anchors there is one reading instead of three.
FREE, GIVEN = ({"GIVEN": given, "LISTED": given} for given in (False, True))
CASES = [
    (statistics_kernel, "fp32", "bf16", None, {**FREE, "HAS_SOFTCAP": False, "WRITE": True}),
    (statistics_kernel, "fp32", "bf16", None, {**GIVEN, "HAS_SOFTCAP": False, "WRITE": True}),
    (statistics_kernel, "fp32", "fp32", "bf16", {**FREE, "HAS_SOFTCAP": True, "WRITE": False}),
    (statistics_kernel, "fp32", "fp32", None, {**GIVEN, "HAS_SOFTCAP": True, "WRITE": False}),
    (statistics_kernel, "fp64", "fp64", "fp64", {**FREE, "HAS_SOFTCAP": True, "WRITE": False}),
    (gradient_kernel, "fp32", "bf16", None, {"HAS_SOFTCAP": False, "PLAIN": True}),
    (gradient_kernel, "fp32", "bf16", "bf16", {"HAS_SOFTCAP": True, "PLAIN": False}),
    (gradient_kernel, "fp32", "fp32", "fp32", {"HAS_SOFTCAP": False, "PLAIN": False}),
    (gradient_kernel, "fp64", "fp64", "fp64", {"HAS_SOFTCAP": False, "PLAIN": False}),
    (listed_largest_kernel, "fp32", "fp32", "bf16", {"HAS_SOFTCAP": True}),
]


def row_launch(architecture):
    return launching.planned(architecture, torch.float32, launching.WIDE).rows


@cache
def compiled(architecture, kernel, logits, out, bias, switches, block, aligned=True):
    """A kernel as it is compiled at run time; ``aligned``: 16 divides the vocabulary."""
    constants = {**dict(switches), "HAS_BIAS": bias is not None, "BLOCK": block}
    dtypes = {"target": "i64", "listed": "i1", "out": out, "bias": bias or logits}
    numbers = ("vocabulary", "stride")
    types = {x: "i32" if x in numbers else "*" + dtypes.get(x, logits) for x in kernel.arg_names}
    warps = row_launch(architecture).warps
    unaligned = () if aligned else numbers
    return compile_kernel(architecture, kernel, types, constants, unaligned=unaligned, num_warps=warps)


@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.parametrize(("kernel", "logits", "out", "bias", "switches"), CASES, ids=name)
def test_kernels_do_not_spill_and_load_whole_vectors(architecture, kernel, logits, out, bias, switches):
    """Nothing but the numbers of a row, one load an argument, is read by less than 128 bits."""
    chosen = row_launch(architecture)
    machine = compiled(architecture, kernel, logits, out, bias, tuple(switches.items()), chosen.block)
    assert_runs_well(machine)
    threads = chosen.warps * TARGETS[architecture].warp_size
    readings = 3 if switches.get("GIVEN") is False else 1  # anchored at the target; the largest; anchored there
    assert machine.wide >= readings * chosen.block * ITEMSIZE[logits] // (VECTOR * threads)
    assert machine.narrow <= len(kernel.arg_names)


@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.parametrize(
    ("kernel", "block", "switches"),
    [
        (statistics_kernel, None, {"HAS_SOFTCAP": False, **FREE, "WRITE": True}),
        (gradient_kernel, None, {"HAS_SOFTCAP": True, "PLAIN": False}),
        (statistics_kernel, 128, {"HAS_SOFTCAP": False, **FREE, "WRITE": True}),
    ],
    ids=name,
)
def test_vocabularies_that_16_does_not_divide_do_not_spill(architecture, kernel, block, switches):
    """Rows start anywhere: loads are narrow; and a small one leaves some threads without a column of their own."""
    block = block or row_launch(architecture).block
    machine = compiled(architecture, kernel, "fp32", "bf16", "bf16", tuple(switches.items()), block, aligned=False)
    assert_runs_well(machine)


@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.parametrize(
    ("kernel", "out", "switches"),
    [(statistics_kernel, "fp32", {**GIVEN, "WRITE": False}), (gradient_kernel, "bf16", {"PLAIN": False})],
    ids=name,
)
def test_a_broken_logit_is_not_taken_for_an_impossible_word(architecture, kernel, out, switches):
    """A GPU's plain maximum of NaN and a number is the number; the interpreter's is NaN, so no result shows it."""
    block = row_launch(architecture).block
    case = (("HAS_SOFTCAP", False), *switches.items())
    ptx = compiled(architecture, kernel, "fp32", out, None, case, block).code
    assert "max.NaN.f32" in ptx
    assert "max.f32" not in ptx


# The fused product: bias, whether there are a softcap and temperatures, out's dtype, whether it is
# all rows or some. Anchored anew, rows are read through pointers.
ANCHORED = [
    (None, False, "bf16", False),
    ("bf16", True, "bf16", False),
    ("bf16", True, "fp32", False),
    ("fp32", True, "bf16", True),
]
PRODUCT = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}
FLOATS = {"hidden": "bf16", "weight": "bf16", "target": "i64", "listed": "i32"}
NUMBERS = ("rows", "vocabulary", "width", "vocabulary_stride", "out_stride")


def product_tile(architecture):
    return launching.planned(architecture, torch.bfloat16, launching.WIDE).tile


def compiled_product(architecture, kernel, tile, constants, **dtypes):
    """As `fused_product` has it compiled for operands that 16 bytes divide; what has no dtype is None."""
    constants = {"width_stride": 1, **constants}
    types = {}
    for argument in kernel.arg_names:
        kind = dtypes.get(argument, FLOATS.get(argument, "fp32"))
        if argument in NUMBERS or argument == "softcap":
            types[argument] = "i32" if argument in NUMBERS else kind
        elif kind is not None:
            types[argument] = kind if kind.startswith("tensordesc") else "*" + kind
        if kind is None:
            constants[argument] = None
    options = {"num_warps": tile.warps, "num_stages": tile.stages} if tile else {"num_warps": 4}
    return compile_kernel(architecture, kernel, types, constants, unaligned=("rows",), **options)


@cache
def compiled_exponentials(architecture, bias, shaped, out, some):
    tile, trait = product_tile(architecture), traits(architecture)
    described = trait.described and not some
    dtypes = {"bias": bias, "out": out, "softcap": "fp32" if shaped else None}
    dtypes["temperature"] = "fp32" if shaped else None
    if described:
        dtypes["hidden"] = f"tensordesc<bf16[{tile.rows},{tile.depth}]>"
        dtypes["weight"] = f"tensordesc<bf16[{tile.columns},{tile.depth}]>"
        dtypes["out"] = out and f"tensordesc<{out}[{tile.rows},{tile.columns // trait.parts}]>"
    if some:
        tile = half_tile(tile)
    else:
        dtypes["listed"] = None
    constants = {
        "DESCRIBED": described,
        "OVERLAPPED": described and trait.overlapped,
        "PARTS": trait.parts,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
    }
    return compiled_product(architecture, exponentials_kernel, tile, constants, **dtypes)


@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.parametrize(("bias", "shaped", "out", "some"), ANCHORED)
def test_the_fused_product_keeps_its_logits_in_registers(architecture, bias, shaped, out, some):
    machine = compiled_exponentials(architecture, bias, shaped, out, some)
    assert some or machine.spilled == 0  # few rows are anchored anew
    assert machine.shared <= SHARED_LIMIT
    assert not machine.atomics
    assert PRODUCT[architecture] in machine.code
    assert "max.NaN.f32" in machine.code
    assert "max.f32" not in machine.code


@pytest.mark.parametrize("architecture", architectures())
def test_descriptors_move_whole_tiles(architecture):
    """Nothing but the numbers of a row goes through a thread's own loads and stores."""
    code = compiled_exponentials(architecture, None, False, "bf16", False).code
    assert "cp.async.bulk.tensor" in code
    assert "cp.async.ca" not in code
    assert "cp.async.cg" not in code
    assert "st.global.v4" not in code


@pytest.mark.parametrize("architecture", architectures())
def test_the_kernels_beside_the_product(architecture):
    """The targets' logits, and the largest ones of some rows."""
    tile = half_tile(product_tile(architecture))
    constants = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
    machine = compiled_product(architecture, largest_kernel, tile, constants, bias="bf16")
    assert_runs_well(machine)
    assert PRODUCT[architecture] in machine.code
    machine = compiled_product(architecture, target_logit_kernel, None, {"BLOCK": 1024}, bias="bf16")
    assert_runs_well(machine)


@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (merge_kernel, MERGED | dict.fromkeys(("before", "merged", "limit", "at_target", "anchors", "temperature"))),
        (merge_kernel, MERGED),
        (anchor_kernel, MERGED),
        (list_kernel, {"BLOCK": LISTED}),
    ],
    ids=name,
)
def test_the_kernels_over_the_sums_of_tiles(architecture, kernel, constants):
    numbers = {"column_tiles": "i32", "rows": "i32", "limit": "fp32", "listed": "*i32"}
    types = {x: numbers.get(x, "*fp32") for x in kernel.arg_names}
    assert_runs_well(compile_kernel(architecture, kernel, types, constants, unaligned=tuple(numbers)))


# Sets of allowed tokens: hidden states and weight, numbers, bias, and the switches.
KEPT = [
    (pairs_kernel, None, "i32", None, {}),
    (pair_logits_kernel, "bf16", "fp32", None, {"HAS_SOFTCAP": False}),
    (pair_logits_kernel, "fp16", "fp32", "bf16", {"HAS_SOFTCAP": True}),
    (pair_logits_kernel, "fp64", "fp64", "fp64", {"HAS_SOFTCAP": True}),
    (allowed_sums_kernel, None, "fp64", None, {"GIVEN": True}),
    (allowed_gradient_kernel, None, "fp32", None, {"HAS_SOFTCAP": False, "PLAIN": True}),
    (allowed_gradient_kernel, None, "fp64", None, {"HAS_SOFTCAP": True, "PLAIN": False}),
    (segment_kernel, "bf16", "fp32", "bf16", {"ADD": False}),
    (segment_kernel, "bf16", "fp32", "fp32", {"ADD": True}),
    (segment_kernel, "fp64", "fp64", "fp64", {"ADD": True}),
]


@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.parametrize(("kernel", "operand", "numbers", "other", "switches"), KEPT, ids=name)
def test_kernels_of_kept_sets_do_not_spill(architecture, kernel, operand, numbers, other, switches):
    """``other`` is the dtype of the bias, or of what a segment's sum is written into."""
    dtypes = {"hidden": operand, "weight": operand, "matrix": operand, "bias": other or numbers, "out": other}
    dtypes |= dict.fromkeys(("rows", "words", "index"), "i32")
    dtypes |= dict.fromkeys(("starts", "bounds", "target", "begins", "ends", "places"), "i64")
    lengths = ("first", "vocabulary", "pairs", "width", "hidden_stride", "weight_stride", "matrix_stride", "out_stride")
    types = {x: "i32" if x in lengths else "*" + (dtypes.get(x) or numbers) for x in kernel.arg_names}
    constants = {
        **switches,
        "PAIRS": triton_allowed.PAIRS,
        "DEPTH": triton_allowed.DEPTH,
        "BLOCK": triton_allowed.BLOCK,
    }
    if kernel is pair_logits_kernel:
        constants["HAS_BIAS"] = other is not None
    if kernel is segment_kernel:
        torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[operand]
        constants["OPERAND"] = triton_allowed.DTYPES[torch_dtype]
    constants = {x: value for x, value in constants.items() if x in kernel.arg_names}
    machine = compile_kernel(architecture, kernel, types, constants, unaligned=("pairs", "first"), num_warps=4)
    assert_runs_well(machine)
    if operand and numbers == "fp32":
        assert machine.wide >= 1  # rows are read by whole vectors


# The kernels over tokens and responses.
LENGTHS = ("rows", "results_stride", "tokens", "responses", "entries")  # not specialised for: nothing is known of them
OF_TERMS = ("clip_low", "clip_high", "log_beta", "entropy_coef")
BLOCK = {"BLOCK": triton_tokens.BLOCK}
TILE = dict(zip(("ROWS", "COLUMNS"), triton_tokens.GROUP_TILE, strict=True))
ALONE = {"matrix": None, "target": None}
POLICY = ("HAS_REPLAYED", "HAS_TEMPERATURE", "HAS_CLIP", "HAS_BETA", "PLAIN")
OBJECTIVE = ("HAS_ENTROPY", "HAS_REPLAYED", "HAS_MASK", "HAS_CLIP", "HAS_BETA")


def switches(names, *off):
    """All switches on but those."""
    return {name: name not in off for name in names} | BLOCK


# The kernel, the dtypes of its floating tensors and of those that differ from them, and the constants.
OF_TOKENS = [
    (token_kernels.finish_kernel, "fp32", {}, BLOCK),
    (token_kernels.finish_kernel, "fp64", {}, BLOCK),
    (token_kernels.policy_rows_kernel, "fp32", {"matrix": "bf16", "target": "i64"}, switches(POLICY)),
    (token_kernels.policy_rows_kernel, "fp32", {"normalizer": "i64"}, switches(POLICY, "PLAIN") | ALONE),
    (token_kernels.policy_rows_kernel, "fp64", {}, switches(POLICY, "PLAIN") | ALONE),
    (token_kernels.policy_objective_kernel, "fp32", {}, switches(OBJECTIVE)),
    (token_kernels.policy_objective_kernel, "fp64", {"advantage": "fp32"}, switches(OBJECTIVE)),
    (token_kernels.centre_groups_kernel, "fp32", {"group": "i64"}, {"SCALE_BY_STD": True, **TILE}),
    (token_kernels.centre_groups_kernel, "fp64", {"group": "i32"}, {"SCALE_BY_STD": True, **TILE}),
    (token_kernels.scale_kernel, "bf16", {"factor": "fp32"}, {"BLOCK": triton_tokens.SCALE_BLOCK}),
    (token_kernels.scale_kernel, "fp64", {}, {"BLOCK": triton_tokens.SCALE_BLOCK}),
    (token_kernels.segment_mean_kernel, "fp64", {"offsets": "i64"}, {"BLOCK": triton_tokens.SEGMENT_BLOCK}),
]


@cache
def compiled_tokens(architecture, kernel, dtype, others, constants):
    """A kernel as `triton_tokens` has it compiled."""
    dtypes = {"replayed": "u1", "counted": "u1", "partials": "fp64", "centred": "fp64", **dict(others)}
    types = {x: "*" + dtypes.get(x, dtype) for x in kernel.arg_names}
    types |= dict.fromkeys((*LENGTHS, "matrix_stride"), "i32") | dict.fromkeys(OF_TERMS, "fp64")
    return compile_kernel(architecture, kernel, types, dict(constants), unaligned=LENGTHS)


@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.parametrize(("kernel", "dtype", "others", "constants"), OF_TOKENS, ids=name)
def test_kernels_of_tokens_do_not_spill(architecture, kernel, dtype, others, constants):
    machine = compiled_tokens(architecture, kernel, dtype, tuple(others.items()), tuple(constants.items()))
    assert_runs_well(machine)


@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.parametrize("kernel", [token_kernels.finish_kernel, token_kernels.policy_rows_kernel], ids=name)
def test_logarithms_are_not_the_approximation_of_the_hardware(architecture, kernel):
    """log1p and expm1 take their accuracy from log's near 1; and bounds let a broken number through."""
    others, constants = next((others, constants) for other, _, others, constants in OF_TOKENS if other is kernel)
    ptx = compiled_tokens(architecture, kernel, "fp32", tuple(others.items()), tuple(constants.items())).code
    assert "ex2.approx" in ptx
    assert "lg2.approx" not in ptx
    assert re.findall(r"\b(?:max|min)\.\S*f32", ptx)
    assert not re.findall(r"\b(?:max|min)\.f32", ptx)


@pytest.mark.parametrize(
    "kernel", [value for key, value in vars(token_kernels).items() if key.endswith("_kernel")], ids=name
)
def test_lengths_and_numbers_compile_nothing_anew(kernel):
    """Numbers arrive in float64, as the cases here have it; neither a number's value nor a length is compiled in."""
    for parameter in kernel.params:
        assert parameter.annotation_type == ("fp64" if parameter.name in OF_TERMS else "")
        assert parameter.do_not_specialize == (parameter.name in LENGTHS)
