"""The tests of the public functions at each instruction set that the processor has."""

import os
import sys

import pytest

from exgrpo.kernels import extension

if extension.MISSING:
    pytest.skip(extension.MISSING, allow_module_level=True)

from exgrpo.kernels.extension import OPERATORS
from tests.programs import ran

ASKED = "EXGRPO_CPU_ISA"
NAMES = ("baseline", "avx2", "avx512")
# Those tests that depend on how the kernels compute.
SHARED = ["threads", "extremes", "allowed_tokens", "linear_log_prob", "linear_policy_loss", "policy_loss", "sequences"]


@pytest.mark.skipif(ASKED in os.environ, reason="this process is for one of them")
@pytest.mark.parametrize(
    ("name", "asked"),
    [("avx2", SHARED[:2]), *(pytest.param(name, SHARED, marks=pytest.mark.long) for name in NAMES)],
    ids=["avx2, quickly", *NAMES],
)
def test_other_instruction_sets(name, asked):
    """The tests that all backends share, in a process of its own."""
    if name == OPERATORS.instruction_set():
        pytest.skip("the other tests of this process are of that instruction set")
    files = [os.path.join(os.path.dirname(__file__), f"test_{file}.py") for file in asked]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "cpu", *files]
    tests = ran(*command, env={**os.environ, ASKED: name})
    if "does not have it" in tests.stdout:
        pytest.skip(f"no {name} here")
    assert tests.returncode == 0, tests.stdout[-4000:]


def test_an_unknown_instruction_set_says_so():
    program = """
import torch
from exgrpo.kernels import linear_log_prob
linear_log_prob(torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64), backend="cpu")
"""
    tried = ran(sys.executable, "-c", program, env={**os.environ, ASKED: "sse9"})
    assert tried.returncode
    assert "EXGRPO_CPU_ISA=sse9: expected baseline, avx2 or avx512" in tried.stderr
