"""The launch plans, without a GPU: made-up devices."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks import tune
from exgrpo.kernels.chunks import chunking
from exgrpo.kernels.chunks.chunking import Cost
from exgrpo.kernels.chunks.products import row_cost
from exgrpo.kernels.timing import Shape
from exgrpo.kernels.triton_chunks import launch
from exgrpo.kernels.triton_chunks.launch import Launch, Tile
from exgrpo.kernels.triton_chunks.triton_passes import rows_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
KNOWN = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
GPU = torch.device("cuda")
VOCABULARY = 152064
SHARED_LIMIT = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}  # KiB of a program


@pytest.mark.parametrize("architecture", [*KNOWN, "cpu", "sm_75", "gfx1100"])
def test_every_machine_has_a_plan(architecture, monkeypatch):
    monkeypatch.setattr(launch, "architecture", lambda device: architecture)
    monkeypatch.setattr(launch, "_memory", lambda device: 140 << 30)
    launch.plan.cache_clear()
    for dtype, width in product(DTYPES, (64, 2559, 2560, 8192)):
        plan = launch.plan(GPU, dtype, width, VOCABULARY)
        assert plan.fused == (architecture == "sm_90" and dtype.itemsize == 2)  # no other was timed yet
        assert launch.plan(GPU, dtype, width, 129).rows.block == 256
        assert plan.rows.block.bit_count() == plan.rows.warps.bit_count() == 1
        assert plan.memory == (16 << 20 if architecture == "cpu" else 1 << 30)
        assert all(number.bit_count() == 1 for number in (plan.tile.rows, plan.tile.columns, plan.tile.depth))
        operands = (plan.tile.rows + plan.tile.columns) * plan.tile.depth * 2 * plan.tile.stages
        assert operands <= SHARED_LIMIT.get(architecture, 48) << 10
    launch.plan.cache_clear()


def test_the_most_specific_plan_decides_and_unknown_gpus_have_that_of_an_older_one():
    older = {"sm_86": "sm_80", "sm_89": "sm_80", "sm_103": "sm_100", "sm_121": "sm_120"}
    for (name, known), dtype in product(older.items(), DTYPES):
        assert launch.planned(name, dtype, 64) == launch.PLANS[known]
    assert launch.planned("sm_70", torch.bfloat16, 64) == launch.planned("sm_9", torch.float32, 64) == launch.DEFAULT
    stages = [launch.planned("sm_90", torch.bfloat16, width).tile.stages for width in (2559, 2560)]
    assert stages == [4, 3]
    assert launch.planned("sm_90", torch.float32, 64) == launch.PLANS["sm_90"]


@pytest.mark.parametrize(
    ("memory", "tokens", "rows"),
    [
        (None, 16384, 2816),  # 22 x 6 tiles of 128 x 256 are one wave of 132 multiprocessors
        (1 << 29, 16384, 1408),  # no number of rows fills a wave: as many tiles as there is memory for
        (None, 3000, 3000),
        (1 << 27, 16384, 256),
    ],
)
def test_chunks_are_whole_waves_of_an_h100(memory, tokens, rows):
    """At D = 1536, V = 151936 in bf16: a row's exponentials, their sums, its hidden states and their gradients."""
    plan = launch.LaunchPlan(fused=True, memory=1 << 30, rows=Launch(4096, 16), tile=Tile(128, 256, 64, 8, 4))
    row = row_cost(torch.bfloat16, 1536, VOCABULARY) + 12_000
    found = rows_of(plan, memory, tokens, 1536, Cost(0, row, ()), 132)
    assert min(found, tokens) == rows
    assert found * row <= (memory or plan.memory)


@given(st.integers(0, 50_000), st.integers(1, 9_000), st.sampled_from([1, 2, 16, 132]), st.integers(128, 40_000))
def test_spans_have_whole_tiles(length, width, processors, rows):
    step = chunking.full_waves(rows, width, processors)
    assert rows / 2 < step + 128
    spans = list(chunking.spans(length, step, 128))
    assert [a for a, _ in spans] + [length] * (length > 0) == [0] * (length > 0) + [b for _, b in spans]
    assert all(0 < b - a <= step for a, b in spans)
    assert all((b - a) % 128 == 0 for a, b in spans[:-1])


@pytest.fixture
def tuned(monkeypatch):
    """Tunes a made-up device in bf16, on which a call takes as long as `cost` of its plan says."""
    monkeypatch.setattr(launch, "PLANS", dict(launch.PLANS))
    monkeypatch.setattr(tune, "make_inputs", lambda *_: (torch.ones(1), torch.ones(1), None, None))
    monkeypatch.setattr(tune, "architecture", lambda device: "sm_90")

    def run(cost, refused=None, wrong=None):
        def run_with(plan, key, loss):
            if plan == refused:
                raise RuntimeError("out of resource: shared memory\nand so on")
            return torch.full((2,), 2.0 if plan == wrong else 1.0)

        def interleave(calls, device, budget):
            return {name: [cost(call.args[0])] for name, call in calls.items()}, {}

        monkeypatch.setattr(tune, "run_with", run_with)
        monkeypatch.setattr(tune, "interleave", interleave)
        return tune.tune(Shape(6, 16, 40), torch.bfloat16, torch.device("cpu"), 1.0)

    return run


BEST = replace(launch.PLANS["sm_90"], fused=True, rows=Launch(2048, 4), tile=Tile(128, 128, 32, 8, 3))


def cost(plan):
    return 1 + (plan.rows != BEST.rows) + 3 * (plan.tile != BEST.tile) * plan.fused + 2 * (not plan.fused)


def test_the_tuner_chooses_what_the_clock_says(tuned, capsys):
    assert tuned(cost) == ("sm_90 bfloat16 narrow", BEST)
    key, plan = tuned(cost, refused=BEST)
    assert plan != BEST
    assert f"{BEST}: skipped, RuntimeError: out of resource: shared memory\n" in capsys.readouterr().out
    key, plan = tuned(cost, wrong=replace(BEST, fused=False, tile=launch.PLANS[key].tile))
    assert plan.rows != BEST.rows
    assert "skipped, its results are wrong" in capsys.readouterr().out
