"""Time and memory of the policy loss as T, D and V grow sixteenfold: time should grow alike, memory not with T * V."""

from functools import partial

import pytest
import torch

from benchmarks.heads import (
    WITH_ENTROPY,
    Case,
    Floor,
    FullLogits,
    Implementation,
    Ours,
    default_backend,
    make_problem,
)
from benchmarks.measure import Results, race
from benchmarks.timing import CLOCK, budget

SWEEPS = {
    "T": [(tokens, 64, 32000) for tokens in (256, 1024, 4096)],
    "D": [(512, width, 16000) for width in (64, 256, 1024)],
    "V": [(1024, 64, vocabulary) for vocabulary in (8000, 32000, 128000)],
}
ROWS: tuple[Implementation, ...] = (Floor(), Ours(default_backend()), FullLogits())
POINTS = [(name, Case(WITH_ENTROPY, *shape, torch.float32)) for name, shapes in SWEEPS.items() for shape in shapes]


def measure(case: Case, device: torch.device, seconds: float) -> Results:
    problem = make_problem(case, device)
    facts = {row.name: {"tokens": case.tokens, "width": case.width, "vocabulary": case.vocabulary} for row in ROWS}
    return race({row.name: row.call(case, problem) for row in ROWS}, device, seconds, facts)


@pytest.mark.timeout(3600)
@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize(("sweep", "case"), POINTS, ids=[f"{name}-{case}" for name, case in POINTS])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_scaling(benchmark, groups, sizes, device, sweep, case, row):
    if benchmark.disabled:
        small = Case(case.operation, 64, 32, 500, case.dtype)
        benchmark.pedantic(row.call(small, make_problem(small, device)))
        return
    measured = partial(measure, case, device, budget(sizes, device))
    groups.report(f"scaling of {sweep}: {case}", row.name, measured, benchmark)
