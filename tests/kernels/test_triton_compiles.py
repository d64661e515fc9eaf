"""The Triton kernels compiled ahead of time for Hopper and Blackwell: it needs no GPU.

Each in the variants that are farthest from one another: nothing spills, and no sum depends on an order.
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from exgrpo.kernels.triton_chunks import launch, token_kernels, triton_allowed, triton_tokens
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
from exgrpo.kernels.triton_chunks.fused_product import LISTED, MERGED, half_tile, tile_with_bias, traits
from exgrpo.kernels.triton_chunks.row_kernels import (
    entropy_kernel,
    gradient_kernel,
    listed_largest_kernel,
    statistics_kernel,
)
from exgrpo.kernels.triton_chunks.triton_fused import ENTROPY_BLOCKS

from .compiling import architectures, assert_runs_well, assert_shows_nan, compile_kernel, name


def pointers(kernel, kind, **others):
    """Types of a kernel's arguments: pointers to a dtype, but for some."""
    return {argument: others.get(argument, f"*{kind}") for argument in kernel.arg_names}


# The logits' dtype, out's, the bias's (None: there is none), and what else there is none of. F goes into bf16 where the
# operands have it; the bias may be fp32 then too, under autocast. Where exp(d) is written, or is F, there is no cap.
FREE, PLAIN = ("given", "listed"), ("upstream_log_prob", "upstream_entropy", "cap")
ROWS = [
    (statistics_kernel, "fp32", "bf16", None, (*FREE, "cap")),
    (statistics_kernel, "fp32", "fp32", "bf16", (*FREE, "out")),
    (statistics_kernel, "fp32", "fp32", None, ("out",)),
    (statistics_kernel, "fp64", "fp64", "fp64", (*FREE, "out")),
    (gradient_kernel, "fp32", "bf16", None, PLAIN),
    (gradient_kernel, "fp32", "bf16", "bf16", ()),
    (gradient_kernel, "fp64", "fp64", "fp64", ("cap",)),
    (listed_largest_kernel, "fp32", "fp32", "bf16", ()),
    (entropy_kernel, "fp32", "bf16", None, ()),
]


@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.parametrize("aligned", [True, False], ids=["", "odd vocabulary"])
@pytest.mark.parametrize(("kernel", "logits", "out", "bias", "absent"), ROWS, ids=name)
def test_rows(architecture, kernel, logits, out, bias, absent, aligned):
    """Where 16 does not divide the vocabulary, rows start anywhere."""
    numbers = dict.fromkeys(("vocabulary", "stride"), "i32")
    dtypes = {"target": "*i64", "listed": "*i1", "out": f"*{out}", "bias": f"*{bias}", "matrix": f"*{out}"}
    chosen = launch.planned(architecture, torch.float32, launch.WIDE).rows
    constants = dict.fromkeys(absent) | {"BLOCK": chosen.block}
    if kernel is entropy_kernel:
        constants["BLOCKS"] = ENTROPY_BLOCKS
    elif bias is None:
        constants["bias"] = None
    more = {"unaligned": () if aligned else tuple(numbers), "num_warps": chosen.warps}
    types = pointers(kernel, logits, **dtypes, **numbers)
    machine = compile_kernel(architecture, kernel, types, constants, **more)
    again = kernel is statistics_kernel and "listed" not in absent
    assert_runs_well(machine, spilling=again and not aligned)  # few rows are read anew
    if kernel is gradient_kernel or (again and aligned):
        assert_shows_nan(machine)


GRADIENT = ("at_target", "intercepts", "slopes")
PRODUCT = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}
FLOATS = {"hidden": "bf16", "weight": "bf16", "target": "i64", "listed": "i32"}
NUMBERS = ("rows", "vocabulary", "width", "vocabulary_stride", "out_stride")


def product_tile(architecture, bias):
    tile = launch.planned(architecture, torch.bfloat16, launch.WIDE).tile
    assert (tile.rows, tile.columns) == (128, 256)
    return tile_with_bias(tile, architecture) if bias else tile


def compiled_product(architecture, kernel, tile, constants, **dtypes):
    """As `fused_product` has it compiled for operands that 16 bytes divide; what has no dtype is None."""
    constants = {"width_stride": 1, **constants}
    types = dict.fromkeys(NUMBERS, "i32")
    for argument in kernel.arg_names:
        kind = dtypes.get(argument, FLOATS.get(argument, "fp32"))
        if kind is None:
            constants[argument] = None
        elif argument not in NUMBERS:
            types[argument] = kind if kind.startswith("tensordesc") else f"*{kind}"
    options = {"num_warps": tile.warps, "num_stages": tile.stages} if tile else {"num_warps": 4}
    return compile_kernel(architecture, kernel, types, constants, unaligned=("rows",), **options)


@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.parametrize(
    ("bias", "out", "again", "known"),
    [
        (None, None, False, ()),
        pytest.param(None, "bf16", False, (), marks=pytest.mark.long),
        pytest.param(None, "fp16", False, (), marks=pytest.mark.long),
        ("bf16", "bf16", False, ()),
        pytest.param(None, "fp32", False, (), marks=pytest.mark.long),
        ("fp32", "bf16", True, ()),
        (None, "bf16", False, GRADIENT[:1]),
        ("bf16", "bf16", False, GRADIENT),
    ],
)
def test_the_fused_product_keeps_its_logits_in_registers(architecture, bias, out, again, known):
    """With temperatures; ``again``: rows with new anchors, few, are read through pointers; ``known``: numbers of the
    gradient of the logits, in the place of sums."""
    tile, trait = product_tile(architecture, bias), traits(architecture)
    described = trait.described and not again
    dtypes = {"bias": bias, "out": out} | dict.fromkeys(set(GRADIENT) - set(known))
    if described:
        operand = "fp16" if out == "fp16" else "bf16"
        dtypes["hidden"] = f"tensordesc<{operand}[{tile.rows},{tile.depth}]>"
        dtypes["weight"] = f"tensordesc<{operand}[{tile.columns},{tile.depth}]>"
        dtypes["out"] = out and f"tensordesc<{out}[{tile.rows},{tile.columns // trait.parts}]>"
    if again:
        tile = half_tile(tile)
    else:
        dtypes["listed"] = None
    if known:
        dtypes |= {"rests": None, "moments": None}
    constants = {"DESCRIBED": described, "OVERLAPPED": described and trait.overlapped, "PARTS": trait.parts}
    constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
    machine = compiled_product(architecture, exponentials_kernel, tile, constants, **dtypes)
    assert_runs_well(machine, spilling=again)
    assert_shows_nan(machine)
    assert PRODUCT[architecture] in machine.code


@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.parametrize("bias", [None, "bf16"])
def test_the_kernels_beside_the_product(architecture, bias):
    """The targets' logits, and the largest ones of some rows."""
    tile = half_tile(product_tile(architecture, bias))
    constants = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
    assert_runs_well(compiled_product(architecture, largest_kernel, tile, constants, bias=bias))
    assert_runs_well(compiled_product(architecture, target_logit_kernel, None, {"BLOCK": 1024}, bias=bias))


SUMS = [
    (merge_kernel, MERGED | dict.fromkeys(("before", "merged", "limit", "at_target", "anchors", "temperature"))),
    (merge_kernel, MERGED),
    (anchor_kernel, MERGED),
    (list_kernel, {"BLOCK": LISTED}),
]


@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.parametrize(("kernel", "constants"), SUMS, ids=name)
def test_the_kernels_over_the_sums_of_tiles(architecture, kernel, constants):
    numbers = {"column_tiles": "i32", "rows": "i32", "limit": "fp32", "listed": "*i32"}
    types = pointers(kernel, "fp32", **numbers)
    assert_runs_well(compile_kernel(architecture, kernel, types, constants, unaligned=tuple(numbers)))


# The dtypes of hidden states and weight, of numbers, and of the bias or what a segment's sum is written to; constants.
ALLOWED = [
    (pairs_kernel, None, "i32", None, {}),
    (pair_logits_kernel, "bf16", "fp32", None, {"cap": None, "bias": None}),
    (pair_logits_kernel, "fp64", "fp64", "fp64", {}),
    (allowed_sums_kernel, None, "fp64", None, {}),
    (allowed_gradient_kernel, None, "fp32", None, dict.fromkeys(("log_prob", "entropy", "cap", "temperature"))),
    (allowed_gradient_kernel, None, "fp64", None, {}),
    (segment_kernel, "bf16", "fp32", "bf16", {"ADD": False, "OPERAND": triton_allowed.DTYPES[torch.bfloat16]}),
    (segment_kernel, "fp64", "fp64", "fp64", {"ADD": True, "OPERAND": triton_allowed.DTYPES[torch.float64]}),
]


@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.parametrize(("kernel", "operand", "numbers", "other", "switches"), ALLOWED, ids=name)
def test_allowed_tokens(architecture, kernel, operand, numbers, other, switches):
    dtypes = dict.fromkeys(("hidden", "weight", "matrix"), f"*{operand}")
    dtypes |= dict.fromkeys(("bias", "out"), f"*{other or numbers}") | dict.fromkeys(("rows", "words", "index"), "*i32")
    dtypes |= dict.fromkeys(("starts", "bounds", "target", "begins", "ends", "places"), "*i64")
    lengths = ("first", "vocabulary", "pairs", "width", "hidden_stride", "weight_stride", "matrix_stride", "out_stride")
    types = pointers(kernel, numbers, **dtypes, **dict.fromkeys(lengths, "i32"))
    sizes = {x: getattr(triton_allowed, x) for x in ("PAIRS", "DEPTH", "BLOCK") if x in kernel.arg_names}
    unaligned = ("pairs", "first")
    assert_runs_well(compile_kernel(architecture, kernel, types, switches | sizes, unaligned=unaligned, num_warps=4))


LENGTHS = ("rows", "results_stride", "tokens", "responses", "entries")  # not specialised for: nothing is known of them
OF_TERMS = ("clip_low", "clip_high", "log_beta", "entropy_coef")
BLOCK = {"BLOCK": triton_tokens.BLOCK}
TILE = dict(zip(("ROWS", "COLUMNS"), triton_tokens.GROUP_TILE, strict=True))
ALONE = {"matrix": None, "target": None}
POLICY = dict.fromkeys(("HAS_CLIP", "HAS_BETA", "PLAIN"), True) | BLOCK
OBJECTIVE = dict.fromkeys(("HAS_CLIP", "HAS_BETA"), True) | BLOCK

# The kernel, the dtypes of its floating tensors and of those that differ from them, and the constants.
TOKENS = [
    (token_kernels.finish_kernel, "fp32", {}, BLOCK),
    (token_kernels.finish_kernel, "fp64", {}, BLOCK),
    (token_kernels.policy_rows_kernel, "fp32", {"matrix": "*bf16", "target": "*i64"}, POLICY),
    (token_kernels.policy_rows_kernel, "fp32", {"normalizer": "*i64"}, POLICY | ALONE | {"PLAIN": False}),
    (token_kernels.policy_rows_kernel, "fp64", {}, POLICY | ALONE | {"PLAIN": False}),
    (token_kernels.policy_objective_kernel, "fp32", {}, OBJECTIVE),
    (token_kernels.policy_objective_kernel, "fp64", {"advantage": "*fp32"}, OBJECTIVE),
    (token_kernels.centre_groups_kernel, "fp32", {"group": "*i64"}, {"SCALE_BY_STD": True, **TILE}),
    (token_kernels.centre_groups_kernel, "fp64", {"group": "*i32"}, {"SCALE_BY_STD": True, **TILE}),
    (token_kernels.scale_kernel, "bf16", {"factor": "*fp32"}, {"BLOCK": triton_tokens.SCALE_BLOCK}),
    (token_kernels.scale_kernel, "fp64", {}, {"BLOCK": triton_tokens.SCALE_BLOCK}),
    (token_kernels.segment_mean_kernel, "fp64", {"offsets": "*i64"}, {"BLOCK": triton_tokens.SEGMENT_BLOCK}),
]


@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.parametrize(("kernel", "dtype", "others", "constants"), TOKENS, ids=name)
def test_tokens(architecture, kernel, dtype, others, constants):
    """log1p and expm1 take their accuracy from log's near 1, which the hardware's approximation lacks."""
    dtypes = dict.fromkeys(("replayed", "counted"), "*u1") | dict.fromkeys(("partials", "centred"), "*fp64")
    dtypes |= dict.fromkeys((*LENGTHS, "matrix_stride"), "i32") | dict.fromkeys(OF_TERMS, "fp64") | others
    types = pointers(kernel, dtype, **dtypes)
    machine = compile_kernel(architecture, kernel, types, constants, unaligned=LENGTHS)
    assert_runs_well(machine)
    assert_shows_nan(machine)
    assert "lg2.approx" not in machine.code
