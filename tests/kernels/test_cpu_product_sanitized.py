"""The bfloat16 products of the CPU backend under AddressSanitizer and UBSan, and with emulated matrix registers."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from exgrpo.kernels import extension

if extension.MISSING:
    pytest.skip(extension.MISSING, allow_module_level=True)
if extension.OPERATORS.product_unavailable():
    pytest.skip(extension.OPERATORS.product_unavailable(), allow_module_level=True)

AVX512 = [f"-m{name}" for name in ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "avx2", "fma")]


@pytest.mark.parametrize(
    "variant",
    [["avx512bf16"], pytest.param(["amx", "-DEXGRPO_EMULATE_AMX"], marks=pytest.mark.long)],
    ids=["avx512bf16", "amx"],
)
def test_right_and_with_nothing_for_sanitizers_to_report(variant, tmp_path):
    """A program of its own, on memory that ends where the arguments end; matrix registers are emulated."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if not shutil.which(compiler[0]):
        pytest.skip("there is no C++ compiler")
    program = tmp_path / "sanitized"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", *AVX512, "-DHAVE_AVX512BF16", "-DHAVE_AMX"]
    flags += [
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        f"-DEXGRPO_VARIANT={variant[0]}",
        *variant[1:],
    ]
    source = Path(__file__).with_name("cpu_product_sanitized.cpp")
    built = subprocess.run([*compiler, *flags, str(source), "-o", str(program)], capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip(f"no sanitizers here: {built.stderr}")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")
