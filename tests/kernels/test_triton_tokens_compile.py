"""The kernels over tokens and responses compiled ahead of time for every architecture: it needs no GPU."""

import re
from functools import cache

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from exgrpo.kernels.triton_chunks import token_kernels, triton_tokens

from .compiling import architectures, assert_runs_well, compile_kernel, name

LENGTHS = ("rows", "results_stride", "tokens", "responses", "entries")  # not specialised for: nothing is known of them
NUMBERS = ("clip_low", "clip_high", "log_beta", "entropy_coef")
BLOCK = {"BLOCK": triton_tokens.BLOCK}
TILE = dict(zip(("ROWS", "COLUMNS"), triton_tokens.GROUP_TILE, strict=True))


ALONE = {"matrix": None, "target": None}
POLICY = ("HAS_REPLAYED", "HAS_TEMPERATURE", "HAS_CLIP", "HAS_BETA", "PLAIN")
OBJECTIVE = ("HAS_ENTROPY", "HAS_REPLAYED", "HAS_MASK", "HAS_CLIP", "HAS_BETA")


def switches(names, *off):
    """All switches on but those."""
    return {name: name not in off for name in names} | BLOCK


# The kernel, the dtypes of its floating tensors and of those that differ from them, and the constants.
CASES = [
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
def compiled(architecture, kernel, dtype, others, constants):
    """A kernel as `triton_tokens` has it compiled."""
    dtypes = {"replayed": "u1", "counted": "u1", "partials": "fp64", "centred": "fp64", **dict(others)}
    types = {x: "*" + dtypes.get(x, dtype) for x in kernel.arg_names}
    types |= dict.fromkeys((*LENGTHS, "matrix_stride"), "i32") | dict.fromkeys(NUMBERS, "fp64")
    return compile_kernel(architecture, kernel, types, dict(constants), unaligned=LENGTHS)


@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.parametrize(("kernel", "dtype", "others", "constants"), CASES, ids=name)
def test_kernels_do_not_spill(architecture, kernel, dtype, others, constants):
    machine = compiled(architecture, kernel, dtype, tuple(others.items()), tuple(constants.items()))
    assert_runs_well(architecture, machine)


@pytest.mark.parametrize("architecture", architectures(lambda name: name.startswith("sm")))
@pytest.mark.parametrize("kernel", [token_kernels.finish_kernel, token_kernels.policy_rows_kernel], ids=name)
def test_logarithms_are_not_the_approximation_of_the_hardware(architecture, kernel):
    """log1p and expm1 take their accuracy from log's near 1; and bounds let a broken number through."""
    others, constants = next((others, constants) for other, _, others, constants in CASES if other is kernel)
    ptx = compiled(architecture, kernel, "fp32", tuple(others.items()), tuple(constants.items())).code
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
        assert parameter.annotation_type == ("fp64" if parameter.name in NUMBERS else "")
        assert parameter.do_not_specialize == (parameter.name in LENGTHS)
