"""The fused head against other implementations, with the bare matrix products as the floor."""

from functools import partial

import pytest
import torch

from benchmarks.heads import (
    FORWARD,
    FULL_GPU,
    OPERATIONS,
    POLICY_LOSS,
    WITH_ENTROPY,
    Case,
    Floor,
    FullLogits,
    Implementation,
    Ours,
    default_backend,
)
from benchmarks.measure import ROWS, measure
from benchmarks.timing import CLOCK, budget

SMALL, TINY = (512, 896, 32000), (64, 64, 1000)
# The heads of SmolLM2-135M and Qwen2.5-0.5B; with gradients, the second one takes too long on two cores.
QUICK_CPU = ((POLICY_LOSS, 512, 576, 49152), (FORWARD, 512, 576, 49152), (FORWARD, 256, 896, 151936))
QUICK_GPU = tuple((operation, *shape) for shape in FULL_GPU[:2] for operation in (POLICY_LOSS, FORWARD))
FULL_CPU = (SMALL, (2048, 1536, 151936))
SWEEPS = {
    "T": [(tokens, 64, 32000) for tokens in (256, 1024, 4096)],
    "D": [(512, width, 16000) for width in (64, 256, 1024)],
    "V": [(1024, 64, vocabulary) for vocabulary in (8000, 32000, 128000)],
}
"""Sixteenfold growth of one size: time should grow alike, and memory not with T * V."""
FRACTIONS = (0.7, 0.5)  # of active tokens


def cases(sizes: str) -> list[Case]:
    """Return the operations on this machine's shapes in the dtypes of training, the most informative first."""
    on_gpu = torch.cuda.is_available()
    if sizes == "tiny":
        return [Case(FORWARD, *TINY, torch.bfloat16), Case(WITH_ENTROPY, *TINY, torch.float32, active=0.5)]
    if sizes == "small":
        dtype, quick = (torch.bfloat16, QUICK_GPU) if on_gpu else (torch.float32, QUICK_CPU)
        return [Case(*sized, dtype) for sized in quick]
    shapes: tuple[tuple[int, int, int], ...] = FULL_GPU if on_gpu else FULL_CPU
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


def chosen(sizes: str) -> list[tuple[str, Case, Implementation]]:
    """Return group, case and implementation of each row."""
    rows = [row for row in ROWS if row.quick or sizes != "small"]
    found = [(str(case), case, row) for case in cases(sizes) for row in rows if case.operation in row.operations]
    if sizes == "full" and not torch.cuda.is_available():
        few = (Floor(), Ours(default_backend()), FullLogits())
        for name, shapes in SWEEPS.items():
            grown = (Case(WITH_ENTROPY, *shape, torch.float32) for shape in shapes)
            found += [(f"scaling of {name}: {case}", case, row) for case in grown for row in few]
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "implementation" in metafunc.fixturenames:
        rows = chosen(metafunc.config.getoption("sizes"))
        ids = [f"{group}-{row.name}" for group, _, row in rows]
        metafunc.parametrize(("group", "case", "implementation"), rows, ids=ids)


@pytest.mark.timeout(3600)
@pytest.mark.benchmark(timer=CLOCK)
def test_head(benchmark, groups, options, device, group, case, implementation, request):
    params = (item.callspec.params for item in request.session.items if hasattr(item, "callspec"))
    selected = [of_item["implementation"] for of_item in params if of_item.get("group") == group]
    rows = [row for row in ROWS if isinstance(row, Floor) or row.name in {one.name for one in selected}]
    name = f"{group}, {options.in_a_row} calls in a row" if options.in_a_row > 1 else group
    measured = partial(measure, case, rows, device, budget(options, device))
    groups.report(name, implementation.name, measured, benchmark)
