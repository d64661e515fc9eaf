"""The fused head against other implementations, with the bare matrix products as the floor."""

from functools import partial

import pytest
import torch

from benchmarks.heads import (
    FORWARD,
    FULL_GPU,
    LOG_PROB,
    OPERATIONS,
    POLICY_LOSS,
    WITH_ENTROPY,
    Case,
    Floor,
    make_problem,
)
from benchmarks.measure import ROWS, measure
from benchmarks.timing import CLOCK, budget

SMALL = (512, 896, 32000)
FULL_CPU = ((1024, 896, 32000), (2048, 1536, 151936))
TINY = (64, 64, 1000)
FRACTIONS = (0.7, 0.5)  # of active tokens


def cases(sizes: str) -> list[Case]:
    """Return the operations on this machine's shapes in the dtypes of training, the most informative first."""
    if sizes == "tiny":
        return [Case(FORWARD, *TINY, torch.bfloat16), Case(WITH_ENTROPY, *TINY, torch.float32, active=0.5)]
    if sizes == "small":
        return [
            *(Case(operation, *SMALL, torch.float32) for operation in (FORWARD, LOG_PROB, POLICY_LOSS, WITH_ENTROPY)),
            *(Case(operation, *SMALL, torch.bfloat16) for operation in (FORWARD, LOG_PROB, POLICY_LOSS)),
            *(Case(operation, *SMALL, torch.float32, active=0.5) for operation in (FORWARD, WITH_ENTROPY)),
        ]
    shapes = FULL_GPU if torch.cuda.is_available() else FULL_CPU
    return [
        *(Case(operation, *shape, torch.bfloat16) for shape in shapes for operation in OPERATIONS),
        *(
            Case(operation, *shape, torch.bfloat16, active)
            for shape in shapes
            for operation in (FORWARD, POLICY_LOSS, WITH_ENTROPY)
            for active in FRACTIONS
        ),
        *(Case(operation, *shape, torch.float32) for shape in shapes for operation in OPERATIONS),
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "implementation" in metafunc.fixturenames:
        pairs = [(c, i) for c in cases(metafunc.config.getoption("sizes")) for i in ROWS if c.operation in i.operations]
        metafunc.parametrize(("case", "implementation"), pairs, ids=[f"{c}-{i.name}" for c, i in pairs])


@pytest.mark.timeout(3600)
@pytest.mark.benchmark(timer=CLOCK)
def test_head(benchmark, groups, sizes, device, case, implementation, in_a_row, request):
    if benchmark.disabled:
        small = Case(case.operation, 64, 32, 500, case.dtype, case.active)
        if reason := implementation.missing(device):
            pytest.skip(reason)
        benchmark.pedantic(implementation.call(small, make_problem(small, device)))
        return
    selected = [
        item.callspec.params["implementation"]
        for item in request.session.items
        if getattr(item, "callspec", None) and item.callspec.params.get("case") == case
    ]
    rows = [row for row in ROWS if isinstance(row, Floor) or row in selected]
    group = f"{case}, {in_a_row} calls in a row" if in_a_row > 1 else str(case)
    measured = partial(measure, case, rows, device, budget(sizes, device), in_a_row)
    groups.report(group, implementation.name, measured, benchmark)
