"""The compiled kernels under AddressSanitizer and UndefinedBehaviorSanitizer, in a program of their own."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("cpu_sanitized.cpp")
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

if not shutil.which(COMPILER[0]):
    pytest.skip("there is no C++ compiler", allow_module_level=True)


@pytest.mark.parametrize(
    "flags", [[], pytest.param(["-march=native"], marks=pytest.mark.long)], ids=["baseline", "native"]
)
def test_nothing_to_report(flags, tmp_path):
    program = tmp_path / "sanitized"
    common = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-DEXGRPO_VARIANT=baseline", *SANITIZERS]
    command = [*COMPILER, *common, *flags, str(DRIVER), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip(f"no sanitizers here: {built.stderr}")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")
