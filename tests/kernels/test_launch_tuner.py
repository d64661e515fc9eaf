"""The tuner that writes a launch table, without a GPU: made-up devices, made-up clocks."""

import math
import os
import subprocess
import sys
import time
from importlib import metadata

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from exgrpo.kernels import tune
from exgrpo.kernels.timing import Shape, Workload
from exgrpo.kernels.triton_chunks import launch
from exgrpo.kernels.triton_chunks.launch import Launch, Tile
from exgrpo.kernels.tune import Tuner

GPU = torch.device("cuda")
VOCABULARY = 152064
NOT_INTERPRETED = metadata.version("triton") < "3.7" and metadata.version("numpy") >= "2.4"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A device of one architecture; no table of one's own is in the environment."""
    monkeypatch.setattr(launch, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(launch, "_memory", lambda device: 140 << 30)
    monkeypatch.delenv(launch.ENVIRONMENT, raising=False)
    launch.forget()
    yield
    launch.forget()


class Machine:
    """A GPU on which a call takes as long as `seconds` of its plan says, and nothing is computed."""

    def __init__(self, monkeypatch, seconds, broken=lambda plan: False, wrong=lambda plan: False):
        self.seconds, self.broken, self.wrong = seconds, broken, wrong
        monkeypatch.setattr(Workload, "forward", lambda work: self.run(work))
        monkeypatch.setattr(Workload, "loss", lambda work, entropy_coef=0.0: self.run(work))

    def run(self, work):
        self.plan = launch.plan(GPU, work.hidden.dtype, work.hidden.shape[1], VOCABULARY)
        if self.broken(self.plan):
            raise RuntimeError("out of resource: shared memory\nand so on")
        return (torch.full((2,), -2.0 if self.wrong(self.plan) else -1.0),)

    def clock(self, call):
        call()
        return self.seconds(self.plan)


BEST_TILE = Tile(128, 256, 64, 8, 3)
SHAPES = [Shape(6000, 16, 4096), Shape(6000, 2560, 4096)]


def cost(plan):
    """Best: blocks of 2048 and 4 warps, BEST_TILE, fused."""
    rows = abs(math.log2(plan.rows.block / 2048)) + plan.rows.warps / 4
    return 1 + rows + 3 * (plan.tile != BEST_TILE) + 2 * (not plan.fused)


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """Tunes a made-up machine for bfloat16; gives the table's path."""

    def make(shape, dtype, device, backend):
        one = torch.ones(1)
        return Workload(torch.ones(1, shape.width, dtype=getattr(torch, dtype)), one, one, one, backend)

    monkeypatch.setattr(tune, "make_workload", make)
    monkeypatch.setattr(tune, "origin", lambda *_: ["Timed on nothing."])

    def run(machine):
        output = tmp_path / "tuned.toml"
        tune.tune(Tuner(GPU, machine.clock, time.monotonic() + 600), ["bfloat16"], SHAPES, output)
        return output

    return run


def test_the_tuner_chooses_what_the_clock_says_and_its_table_reads_back(monkeypatch, tuned):
    output = tuned(Machine(monkeypatch, cost))
    with tune.laid_over(output):
        for shape in SHAPES:
            plan = launch.plan(GPU, torch.bfloat16, shape.width, VOCABULARY)
            assert plan == launch.Plan(fused=True, memory=1 << 30, rows=Launch(2048, 4), tile=BEST_TILE)
    assert launch.ENVIRONMENT not in os.environ
    sections = launch.TABLE.read(output)["sm_90"]["bfloat16"]
    assert sections["narrow"] == sections["wide"]
    comments = output.read_text()
    assert "Timed on nothing." in comments
    assert 'logits = "fused": ' in comments


def test_candidates_that_fail_or_are_wrong_are_skipped_with_a_line(monkeypatch, tuned, capsys):
    machine = Machine(
        monkeypatch,
        cost,
        broken=lambda plan: plan.fused and plan.tile == BEST_TILE,
        wrong=lambda plan: plan.rows == Launch(2048, 4),
    )
    output = tuned(machine)
    narrow = launch.TABLE.read(output)["sm_90"]["bfloat16"]["narrow"]
    assert narrow["rows"] != {"block": 2048, "warps": 4}
    assert narrow["tile"] != BEST_TILE.__dict__
    shown = capsys.readouterr().out
    assert "rows = { block = 2048, warps = 4 }: skipped, its results are wrong" in shown
    assert "skipped, RuntimeError: out of resource: shared memory\n" in shown


def test_nothing_that_runs_is_an_error(monkeypatch, tuned):
    with pytest.raises(RuntimeError, match="no launch of the row kernels runs for bfloat16"):
        tuned(Machine(monkeypatch, cost, broken=lambda plan: True))


def run_tuner(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "exgrpo.kernels.tune", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_program_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert tune.main(["--output", str(tmp_path / "table.toml")]) == 2
    assert capsys.readouterr().err.startswith("error: nothing to tune here: it needs a GPU")
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.skipif(NOT_INTERPRETED, reason="Triton before 3.7 interprets nothing with NumPy 2.4 or later")
def test_the_program_tunes_the_interpreter(tmp_path):
    output = tmp_path / "folder" / "table.toml"
    options = ("--shapes", "4,16,128", "--dtype", "float32", "--minutes", "0.02")
    done = run_tuner("--output", str(output), *options, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"{output}\n")
    assert list(launch.TABLE.read(output)["cpu"]["float32"]) == ["narrow"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a CUDA device")
def test_the_program_tunes_this_gpu(tmp_path):
    output = tmp_path / "table.toml"
    done = run_tuner("--output", str(output), "--shapes", "512,256,8192", "--minutes", "0.5")
    assert done.returncode == 0, done.stderr
    (name,) = launch.TABLE.read(output)
    assert name.startswith(("sm_", "gfx"))
