"""The compiled row kernels by themselves, at each instruction set that the processor has, against float64."""

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
from exgrpo.kernels.chunks.softmax import Sums, Upstream
from exgrpo.kernels.extension import OPERATORS

from .support import check_schema

ASKED = "EXGRPO_CPU_ISA"
# Those tests that depend on how the kernels compute.
SHARED = [
    "test_cpu_passes.py",
    "test_cpu_tokens.py",
    "test_extremes.py",
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


def exact_sums(logits, target, *, bias=None, softcap=None, temperature=None, anchor=None):
    """The same in float64: sums, and exp(d), 0 at the target."""
    z = logits.double() if bias is None else logits.double() + bias.double()
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    tau = torch.ones(len(z), dtype=torch.float64) if temperature is None else temperature.double()
    anchor = z.amax(1) if anchor is None else anchor.double()
    held = (target >= 0).unsqueeze(1)
    d = (z - anchor.unsqueeze(1)) / tau.unsqueeze(1)
    at_target = torch.zeros_like(d, dtype=torch.bool).scatter_(1, target.clamp(min=0).unsqueeze(1), held)
    gap = torch.where(at_target, d, -torch.inf).amax(1)
    e = d.exp().masked_fill(at_target, 0)
    return Sums(anchor, gap, e.sum(1), (e * d.clamp(min=softmax.UNDERFLOWN)).sum(1)), e


def row_sums(logits, target, *, bias=None, softcap=None, temperature=None, anchor=None, write=True):
    return Sums(*OPERATORS.row_sums(logits, bias, softcap, target, temperature, anchor, write))


@pytest.mark.skipif(ASKED in os.environ, reason="this process is for one of them")
@pytest.mark.parametrize("name", ["baseline", "avx2", "avx512"])
def test_other_instruction_sets(name):
    """The tests that all backends share, in a process of its own."""
    if name == OPERATORS.instruction_set():
        pytest.skip("the other tests of this process are of that instruction set")
    files = [os.path.join(os.path.dirname(__file__), file) for file in SHARED]
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


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 4, 5, 15, 16, 17, 31, 64, 65, 1000, 4099])
@pytest.mark.parametrize("shape", ["plain", "bias", "capped"])
@pytest.mark.parametrize("given", [False, True])
def test_sums_and_exponentials(vocabulary, shape, given, dtype):
    logits, target = make_rows(7, vocabulary, dtype, beyond=5)
    more = {"temperature": torch.linspace(0.5, 2, 7, dtype=dtype)} if shape != "plain" else {}
    if shape != "plain":
        more["bias"] = torch.randn(vocabulary, dtype=dtype)
    if shape == "capped":
        more["softcap"] = 5.0
    before = logits.clone()
    if given:
        more["anchor"] = exact_sums(before, target, **more)[0].anchor.to(dtype) + 0.5
    exact, e = exact_sums(before, target, **more)
    found = row_sums(logits, target, **more)
    # d is rounded where it is large, and exp turns its absolute error into a relative one.
    rounding = 200 * EPSILON[dtype]
    assert torch.allclose(found.anchor.double(), exact.anchor, rtol=rounding, atol=rounding)
    assert torch.equal(found.gap == -torch.inf, target < 0)
    held = target >= 0
    assert torch.allclose(found.gap[held].double(), exact.gap[held], rtol=rounding, atol=rounding)
    assert torch.allclose(found.rest.double(), exact.rest, rtol=rounding, atol=1e-30)
    assert torch.allclose(found.moment.double(), exact.moment, rtol=rounding, atol=rounding * (1 + exact.rest.max()))
    assert torch.allclose(logits.double(), e, rtol=rounding, atol=1e-30)
    assert (logits[held, target[held]] == 0).all()
    assert logits._base.isnan().sum() == 7 * 5


def test_long_sums_lose_nothing():
    """152 thousand terms: the sums are as good as their terms, not worse with the square root of their number."""
    logits, target = make_rows(3, 151_936, torch.float32)
    logits -= logits.amax(1, keepdim=True)
    exact, _ = exact_sums(logits, target)
    found = row_sums(logits, target, write=False)
    for mine, true in ((found.rest, exact.rest), (found.moment, exact.moment)):
        assert ((mine.double() - true).abs() <= 3e-7 * true.abs()).all()


def test_forward_only_writes_nothing_back(dtype):
    logits, target = make_rows(5, 300, dtype)
    target.clamp_(min=0)
    before = logits.clone()
    kept = row_sums(logits, target, write=False)
    changed = logits != before
    assert torch.equal(changed.nonzero()[:, 1], target)
    assert all(torch.equal(a, b) for a, b in zip(kept, row_sums(before, target), strict=True))


def test_broken_logits_show(dtype):
    """NaN stays NaN wherever it stands; a word that is ruled out does no harm."""
    logits = torch.randn(4, 50, dtype=dtype)
    target = torch.full((4,), 7)
    logits[0, 30], logits[1, 49], logits[2, 7], logits[3, 8:] = torch.nan, torch.nan, torch.nan, -torch.inf
    sums = row_sums(logits, target)
    assert sums.rest[:2].isnan().all()
    assert sums.moment[:2].isnan().all()
    assert sums.gap[2].isnan()
    assert torch.stack(tuple(sums))[:, 3].isfinite().all()
    assert not logits[3, 8:].any()


def test_no_vocabulary_at_all(dtype):
    """An empty shard: the others have everything."""
    logits, target = torch.empty(3, 0, dtype=dtype), torch.full((3,), -1)
    assert (OPERATORS.row_largest(logits, None, None) == -torch.inf).all()
    sums = row_sums(logits, target, anchor=torch.ones(3, dtype=dtype))
    assert (sums.gap == -torch.inf).all()
    assert not sums.rest.any()
    assert not sums.moment.any()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_gradient(softcap, dtype):
    """F from exp(d): the formulas of `softmax.Factors`, in float64."""
    rows, vocabulary = 7, 301
    logits, target = make_rows(rows, vocabulary, dtype, beyond=3)
    target.clamp_(min=0)
    z = logits.double().clone()
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    tau = torch.linspace(0.5, 2, rows, dtype=dtype)
    found = row_sums(logits, target, temperature=tau, softcap=softcap)
    statistics, _ = softmax.finished(Sums(*(value.double() for value in found)))
    c, h = torch.randn(2, rows, dtype=dtype)
    factors = softmax.row_factors(tau.double(), softcap, statistics, Upstream(c.double(), h.double()))
    d = (z - statistics.anchor.unsqueeze(1)) / tau.double().unsqueeze(1)
    exact = d.exp() * (c.double().unsqueeze(1) + h.double().unsqueeze(1) * (d - statistics.mean.unsqueeze(1)))
    exact.scatter_(1, target.unsqueeze(1), factors.at_target.unsqueeze(1))
    if softcap is not None:
        exact *= 1 - (z / softcap).square()
    mean, at_target = statistics.mean.to(dtype), factors.at_target.to(dtype)
    OPERATORS.row_gradient(logits, target, tau, softcap, found.anchor, found.gap, mean, at_target, c, h)
    assert torch.allclose(logits.double(), exact, rtol=300 * EPSILON[dtype], atol=30 * EPSILON[dtype])


def test_same_bits_for_any_number_of_threads(set_threads, dtype):
    logits, target = make_rows(64, 4099, dtype)
    target.clamp_(min=0)
    factors = torch.randn(4, 64, dtype=dtype)

    def everything():
        matrix = logits.clone()
        sums = row_sums(matrix, target)
        OPERATORS.row_gradient(matrix, target, None, None, *sums[:2], *factors)
        return [matrix, *sums]

    set_threads(1)
    alone = everything()
    set_threads(2)
    assert all(torch.equal(a, b) for a, b in zip(alone, everything(), strict=True))


def test_operators_keep_their_schemas(dtype):
    """What is written is what the schema says; they have neither fakes nor derivatives, since operators call them."""
    logits, target = make_rows(6, 40, dtype)
    values = list(torch.rand(6, 6, dtype=dtype))
    bias = torch.randn(40, dtype=dtype)
    check_schema(OPERATORS.row_largest, logits, bias, 5.0)
    check_schema(OPERATORS.row_sums, logits, bias, 5.0, target, values[0], None, True)
    check_schema(OPERATORS.row_sums, logits, None, None, target, None, values[0], False)
    check_schema(OPERATORS.row_gradient, logits.exp(), target, None, 5.0, *values)
    check_schema(OPERATORS.advise_huge_pages, logits)
    check_schema(OPERATORS.instruction_set, autograd=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.tensor([0, 40])}, "target: expected columns of the matrix"),
        ({"target": torch.tensor([0, -2])}, "target: expected columns of the matrix"),
        ({"target": torch.tensor([0.0, 1.0])}, "target: expected the dtype"),
        ({"temperature": torch.ones(3)}, "temperature: expected a contiguous tensor of the length"),
        ({"bias": torch.ones(40, dtype=torch.float64)}, "bias: expected the dtype"),
        ({"logits": torch.zeros(40, 2).t()}, "logits: expected a matrix on the CPU with unit stride"),
        ({"logits": torch.zeros(2, 40, dtype=torch.bfloat16)}, "logits: expected float32 or float64"),
    ],
)
def test_wrong_arguments(change, message):
    """Nothing is ever written beside the matrix."""
    arguments = {"logits": torch.zeros(2, 40), "target": torch.tensor([0, 1]), **change}
    with pytest.raises(RuntimeError, match=message):
        row_sums(arguments.pop("logits"), arguments.pop("target"), **arguments)
