"""The compiled row kernels by themselves: precision and bits; and the tests of the public functions at
each instruction set that the processor has.
"""

import math
import os
import subprocess
import sys

import pytest
import torch

from exgrpo.kernels import extension

if extension.MISSING:
    pytest.skip(extension.MISSING, allow_module_level=True)

from exgrpo.kernels.chunks import softmax
from exgrpo.kernels.chunks.softmax import Sums
from exgrpo.kernels.extension import OPERATORS

ASKED = "EXGRPO_CPU_ISA"
NAMES = ("baseline", "avx2", "avx512")
# Those tests that depend on how the kernels compute.
SHARED = [
    "test_cpu_passes.py",
    "test_threads.py",
    "test_extremes.py",
    "test_allowed_tokens.py",
    "test_linear_log_prob.py",
    "test_linear_policy_loss.py",
    "test_policy_loss.py",
    "test_sequences.py",
]
EPSILON = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


@pytest.fixture(params=EPSILON, ids=["fp32", "fp64"])
def dtype(request):
    return request.param


def make_rows(rows, vocabulary, dtype, *, beyond=0):
    """Logits in a wider matrix, NaN beyond them; and targets, some of which are on another rank."""
    matrix = torch.full((rows, vocabulary + beyond), torch.nan, dtype=dtype)
    matrix[:, :vocabulary] = 3 * torch.randn(rows, vocabulary, dtype=dtype)
    target = torch.randint(0, vocabulary, (rows,))
    target[1::3] = -1
    return matrix[:, :vocabulary], target


def row_sums(logits, target, *, bias=None, softcap=None, temperature=None, anchor=None, write=True):
    return Sums(*OPERATORS.row_sums(logits, bias, softcap, target, temperature, anchor, write))


@pytest.mark.skipif(ASKED in os.environ, reason="this process is for one of them")
@pytest.mark.parametrize(
    ("name", "asked"),
    [("avx2", SHARED[:3]), *(pytest.param(name, SHARED, marks=pytest.mark.long) for name in NAMES)],
    ids=["avx2, quickly", *NAMES],
)
def test_other_instruction_sets(name, asked):
    """The tests that all backends share, in a process of its own."""
    if name == OPERATORS.instruction_set():
        pytest.skip("the other tests of this process are of that instruction set")
    files = [os.path.join(os.path.dirname(__file__), file) for file in asked]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "cpu", *files]
    tests = subprocess.run(command, env={**os.environ, ASKED: name}, capture_output=True, text=True)
    if "does not have it" in tests.stdout:
        pytest.skip(f"no {name} here")
    assert tests.returncode == 0, tests.stdout[-4000:]


def test_the_instruction_set_asked_for():
    assert OPERATORS.instruction_set() == os.environ.get(ASKED, OPERATORS.instruction_set())


def test_an_unknown_instruction_set_says_so():
    program = """
import torch
from exgrpo.kernels import linear_log_prob
linear_log_prob(torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64), backend="cpu")
"""
    environment = {**os.environ, ASKED: "sse9"}
    tried = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert tried.returncode
    assert "EXGRPO_CPU_ISA=sse9: expected baseline, avx2 or avx512" in tried.stderr


def test_exponentials_to_two_roundings(dtype):
    """Over all numbers whose exponential is a normal one; below it is 0, and never below 0."""
    smallest = torch.finfo(dtype).tiny
    lowest = math.log(smallest)
    d = torch.cat((torch.linspace(1.1 * lowest, 0, 200_000, dtype=torch.float64), -torch.logspace(-30, 1, 10_000)))
    row = d.to(dtype).unsqueeze(0)
    exact = row.double().exp()
    row_sums(row, torch.tensor([-1]), anchor=torch.zeros(1, dtype=dtype))
    error = (row.double() - exact).abs()
    normal = exact > 1.5 * smallest
    assert (error[normal] <= 2 * EPSILON[dtype] * exact[normal]).all()
    assert (row >= 0).all()
    assert (error[~normal] <= 1.5 * smallest).all()


def test_logarithms_and_tangents(dtype):
    """What the entropy's gradient and the cap are made of, to a few roundings."""
    ones = torch.ones(1, dtype=dtype)
    e = torch.cat((torch.logspace(-30, 0, 100_000), 1 - torch.logspace(-6, -1, 10_000))).to(dtype).unsqueeze(0)
    exact = e.double() * e.double().log()
    row = e.clone()
    OPERATORS.row_gradient(row, torch.tensor([-1]), None, None, *[0 * ones] * 5, ones)
    assert ((row.double() - exact).abs() <= 4 * EPSILON[dtype] * exact.abs()).all()
    z = torch.cat((torch.logspace(-20, 3, 50_000), -torch.logspace(-20, 3, 50_000))).to(dtype).unsqueeze(0)
    exact = 5 * torch.tanh(z.double() / 5)
    OPERATORS.row_largest(z, None, 5.0)
    assert ((z.double() - exact).abs() <= 8 * EPSILON[dtype] * exact.abs()).all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 15), (64, 64), (301, 2113), (5, 8209), (3001, 70)])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_of_columns(rows, columns, stored):
    """To some roundings of their terms, in memory that has a gap behind each row."""
    matrix, _ = make_rows(rows, columns, torch.float64, beyond=3)
    matrix = matrix.to(stored)
    precise = torch.promote_types(stored, torch.float32)
    factor, total = torch.randn(rows, dtype=precise), torch.randn(columns, dtype=precise)
    terms = torch.cat((total.double().unsqueeze(0), matrix.double() * factor.double().unsqueeze(1)))
    OPERATORS.add_column_sums(matrix, factor, total)
    assert ((total.double() - terms.sum(0)).abs() <= 8 * EPSILON[precise] * terms.abs().sum(0)).all()


def test_long_sums_lose_nothing():
    """152 thousand terms: the sums are as good as their terms, not worse with the square root of their number."""
    logits, target = make_rows(3, 151_936, torch.float32)
    logits -= logits.amax(1, keepdim=True)
    d = logits.double()
    held = target >= 0
    d[held, target[held]] = -torch.inf  # not in the sums
    exact = (d.exp().sum(1), (d.exp() * d.clamp(min=softmax.UNDERFLOWN)).sum(1))
    found = row_sums(logits, target, write=False)
    for mine, true in zip((found.rest, found.moment), exact, strict=True):
        assert ((mine.double() - true).abs() <= 3e-7 * true.abs()).all()
