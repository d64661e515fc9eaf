"""Launch plans of GPUs that are not here, and the tuner on a made-up one."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks import tune
from exgrpo.kernels import backend_choice
from exgrpo.kernels.triton_chunks import launch
from exgrpo.kernels.triton_chunks.launch import Launch, Tile
from exgrpo.kernels.triton_chunks.triton_passes import plan_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
KNOWN = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
GPU = torch.device("cuda")
SHARED_LIMIT = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}  # KiB of a program


@pytest.mark.parametrize("architecture", [*KNOWN, "cpu", "sm_75", "gfx1100"])
def test_every_machine_has_a_plan(architecture, monkeypatch):
    monkeypatch.setattr(launch, "architecture", lambda device: architecture)
    monkeypatch.setattr(launch, "_memory", lambda device: 140 << 30)
    launch.plan.cache_clear()
    for dtype, width in product(DTYPES, (64, 2559, 2560, 8192)):
        plan = launch.plan(GPU, dtype, width, 152064)
        assert plan.fused == (architecture in ("sm_90", "sm_100") and dtype.itemsize == 2)
        assert launch.plan(GPU, dtype, width, 129).rows.block == 256
        assert plan.rows.block.bit_count() == plan.rows.warps.bit_count() == 1
        assert plan.memory == (16 << 20 if architecture == "cpu" else 1 << 30)
        assert all(number.bit_count() == 1 for number in (plan.tile.rows, plan.tile.columns, plan.tile.depth))
        operands = (plan.tile.rows + plan.tile.columns) * plan.tile.depth * 2 * plan.tile.stages
        assert operands <= SHARED_LIMIT.get(architecture, 48) << 10
    launch.plan.cache_clear()


def test_a_bias_takes_a_narrower_tile_on_blackwell_alone(monkeypatch):
    options, shard = SimpleNamespace(operand=torch.bfloat16, softcap=None), SimpleNamespace(largest=152064)
    products = SimpleNamespace(weight=torch.empty(1, 4096, dtype=torch.bfloat16))
    columns = {}
    for name, bias in product(("sm_90", "sm_100"), (None, torch.empty(1))):
        for module in (launch, backend_choice):
            monkeypatch.setattr(module, "architecture", lambda device, name=name: name)
        launch.plan.cache_clear()
        head = SimpleNamespace(products=products, options=options, shard=shard, head=SimpleNamespace(bias=bias))
        columns[name, bias is not None] = plan_of(head).tile.columns
    assert columns == {("sm_90", False): 256, ("sm_90", True): 256, ("sm_100", False): 256, ("sm_100", True): 128}
    launch.plan.cache_clear()


BEST = replace(launch.PLANS["sm_90"], fused=True, rows=Launch(2048, 4), tile=Tile(128, 128, 32, 8, 3))


def seconds(plan):
    return 1 + (plan.rows != BEST.rows) + 3 * (plan.tile != BEST.tile) * plan.fused + 2 * (not plan.fused)


def test_the_tuner_chooses_what_the_clock_says(monkeypatch, capsys):
    """On a made-up device, where some plans cannot run and some compute something else."""

    def run_with(plan, key, loss):
        if plan.rows.block > 4096:
            raise RuntimeError("out of resource: shared memory\nand so on")
        return torch.full((2,), 2.0 if plan.rows == Launch(2048, 8) else 1.0)

    def interleave(calls, device, budget):
        return {name: [seconds(call.args[0])] for name, call in calls.items()}, {}

    monkeypatch.setattr(launch, "PLANS", dict(launch.PLANS))
    monkeypatch.setattr(tune, "make_inputs", lambda *_: (torch.ones(1), torch.ones(1), None))
    monkeypatch.setattr(tune, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(tune, "run_with", run_with)
    monkeypatch.setattr(tune, "interleave", interleave)
    assert tune.tune((6, 16, 40), torch.bfloat16, torch.device("cpu"), 1.0) == ("sm_90 bfloat16 narrow", BEST)
    printed = capsys.readouterr().out
    assert "skipped, RuntimeError: out of resource: shared memory\n" in printed
    assert "skipped, its results are wrong" in printed
