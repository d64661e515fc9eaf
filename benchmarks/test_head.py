"""The fused head against other implementations, with the bare matrix products as the floor."""

from argparse import Namespace
from functools import partial

import pytest
import torch

from benchmarks.heads import FORWARD, OPERATIONS, POLICY_LOSS, WITH_ENTROPY, Case, Floor, Implementation
from benchmarks.measure import ROWS, measure
from benchmarks.timing import clock

TINY = (64, 64, 1000)
# The heads of SmolLM2-135M and Qwen2.5-0.5B; with gradients, the second one takes too long on two cores.
QUICK_CPU = ((POLICY_LOSS, 512, 576, 49152), (FORWARD, 512, 576, 49152), (FORWARD, 256, 896, 151936))
FULL_CPU = ((512, 896, 32000), (2048, 1536, 151936))
FULL_GPU = ((8192, 1536, 151936), (8192, 3584, 152064), (8192, 4096, 131072), (16384, 4096, 151936))
QUICK_GPU = tuple((operation, *shape) for shape in FULL_GPU[:2] for operation in (POLICY_LOSS, FORWARD))
FRACTIONS = (0.7, 0.5)  # of active tokens


def cases(options: Namespace) -> list[Case]:
    """Return the operations on this machine's shapes in the dtypes of training, the most informative first."""
    on_gpu = torch.cuda.is_available()
    if options.shape:
        operations = OPERATIONS if options.sizes == "full" else (POLICY_LOSS, FORWARD)
        return [Case(operation, *shape) for shape in options.shape for operation in operations]
    if options.sizes == "tiny":
        return [Case(FORWARD, *TINY, torch.bfloat16), Case(WITH_ENTROPY, *TINY, torch.float32, active=0.5)]
    if options.sizes == "small":
        dtype, quick = (torch.bfloat16, QUICK_GPU) if on_gpu else (torch.float32, QUICK_CPU)
        return [Case(*sized, dtype) for sized in quick]
    shapes: tuple[tuple[int, int, int], ...] = FULL_GPU if on_gpu else FULL_CPU
    whole = [(operation, 1.0) for operation in OPERATIONS]
    some = [(operation, active) for operation in (FORWARD, POLICY_LOSS, WITH_ENTROPY) for active in FRACTIONS]
    rounds = ((torch.bfloat16, whole), (torch.bfloat16, some), (torch.float32, whole))
    return [Case(name, *shape, dtype, active) for dtype, kinds in rounds for shape in shapes for name, active in kinds]


def chosen(options: Namespace) -> list[tuple[str, Case, Implementation]]:
    """Return group, case and implementation of each row."""
    rows = [row for row in ROWS if row.quick or options.sizes != "small" or options.shape]
    return [(str(case), case, row) for case in cases(options) for row in rows if case.operation in row.operations]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "implementation" in metafunc.fixturenames:
        rows = chosen(metafunc.config.option)
        ids = [f"{group}-{row.name}" for group, _, row in rows]
        metafunc.parametrize(("group", "case", "implementation"), rows, ids=ids)


@pytest.mark.timeout(3600)
@pytest.mark.benchmark(timer=clock)
def test_head(benchmark, groups, budget, device, group, case, implementation, request):
    params = (item.callspec.params for item in request.session.items if hasattr(item, "callspec"))
    selected = {of_item["implementation"].name for of_item in params if of_item.get("group") == group}
    rows = [row for row in ROWS if isinstance(row, Floor) or row.name in selected]
    name = f"{group}, {budget.in_a_row} calls in a row" if budget.in_a_row > 1 else group
    groups.report(name, implementation.name, partial(measure, case, rows, device, budget), benchmark)
