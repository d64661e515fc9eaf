"""The compiled kernels of the CPU backend under AddressSanitizer and UBSan, each in a program of its own.

Its memory ends where the arguments end; matrix registers are emulated.
"""

import os
import shlex
import shutil
from pathlib import Path

import pytest

from exgrpo.kernels import extension
from tests.programs import ran

COMPILER = shlex.split(os.environ.get("CXX", "c++"))
FLAGS = "-std=c++17 -O1 -Wall -Wextra -Werror -fsanitize=address,undefined -fno-sanitize-recover=all"
AVX512 = [f"-m{name}" for name in ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "avx2", "fma")]
PRODUCT = ["cpu_product_sanitized.cpp", *AVX512, "-DHAVE_AVX512BF16", "-DHAVE_AMX"]
PROGRAMS = {
    "rows": ["cpu_sanitized.cpp", "-DEXGRPO_VARIANT=baseline"],
    "rows, native": ["cpu_sanitized.cpp", "-DEXGRPO_VARIANT=baseline", "-march=native"],
    "product": [*PRODUCT, "-DEXGRPO_VARIANT=avx512bf16"],
    "product, amx": [*PRODUCT, "-DEXGRPO_VARIANT=amx", "-DEXGRPO_EMULATE_AMX"],
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if "," in name else name for name in PROGRAMS]
)
def test_right_and_with_nothing_for_sanitizers_to_report(name, tmp_path):
    if not shutil.which(COMPILER[0]):
        pytest.skip("there is no C++ compiler")
    if name.startswith("product"):
        reason = extension.MISSING or extension.OPERATORS.product_unavailable()
        if reason:
            pytest.skip(reason)
    source, *flags = PROGRAMS[name]
    program = tmp_path / "sanitized"
    built = ran(*COMPILER, *FLAGS.split(), *flags, Path(__file__).with_name(source), "-o", program)
    if "cannot find" in built.stderr:
        pytest.skip(f"no sanitizers here: {built.stderr}")
    assert built.returncode == 0, built.stderr
    done = ran(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
