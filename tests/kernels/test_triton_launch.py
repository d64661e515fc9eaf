"""The launch table and the tuner that writes one, without a GPU: made-up devices, made-up clocks."""

import math
import os
import subprocess
import sys
import time
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from exgrpo.kernels.chunks import chunking
from exgrpo.kernels.tables import DEFAULT, DTYPES
from exgrpo.kernels.triton_chunks import launch, tune
from exgrpo.kernels.triton_chunks.launch import Launch, Tile
from exgrpo.kernels.triton_chunks.tune import Tuner
from exgrpo.kernels.workload import Shape, Workload

KNOWN = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
GPU = torch.device("cuda")
VOCABULARY = 152064
SHARED_LIMIT = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}  # KiB of a program


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Sets architecture and memory of the device; no table of one's own is in the environment."""

    def set_machine(architecture, gibibytes=140):
        monkeypatch.setattr(launch, "architecture", lambda device: architecture)
        monkeypatch.setattr(launch, "_memory", lambda device: gibibytes << 30)
        launch.forget()

    monkeypatch.delenv(launch.ENVIRONMENT, raising=False)
    set_machine("sm_90")
    yield set_machine
    launch.forget()


@pytest.fixture
def own(monkeypatch, tmp_path):
    """Lays a table over the shipped one."""

    def lay(text):
        path = tmp_path / "own.toml"
        path.write_text(text)
        monkeypatch.setenv(launch.ENVIRONMENT, str(path))
        launch.forget()
        return path

    return lay


@pytest.mark.parametrize("architecture", [*KNOWN, "cpu", "sm_75", "gfx1100"])
@pytest.mark.parametrize(("dtype", "width"), list(product(DTYPES, (64, 2559, 2560, 8192))))
def test_every_machine_has_a_plan(machine, architecture, dtype, width):
    machine(architecture)
    plan = launch.plan(GPU, getattr(torch, dtype), width, VOCABULARY)
    assert not plan.fused  # nothing was timed yet
    assert plan.rows.block.bit_count() == plan.rows.warps.bit_count() == 1
    assert 1 <= plan.chunk_rows <= 4096
    assert all(number.bit_count() == 1 for number in (plan.tile.rows, plan.tile.columns, plan.tile.depth))
    operands = (plan.tile.rows + plan.tile.columns) * plan.tile.depth * 2 * plan.tile.stages
    assert operands <= SHARED_LIMIT.get(architecture, 48) << 10


def test_the_shipped_table_is_about_the_known_architectures():
    assert set(launch.TABLE.read(launch.SHIPPED)) == {DEFAULT, "cpu", *KNOWN}


def test_estimates_know_the_default_chunk():
    assert launch.TABLE.read(launch.SHIPPED)[DEFAULT]["chunk_rows"] == chunking.GPU_ROWS


def test_unknown_gpus_get_the_default(machine):
    machine("sm_75")
    plan = launch.plan(GPU, torch.bfloat16, 4096, VOCABULARY)
    shipped = launch.TABLE.read(launch.SHIPPED)[DEFAULT]
    assert (plan.rows, plan.tile) == (Launch(**shipped["rows"]), Tile(**shipped["tile"]))


@pytest.mark.parametrize(
    ("vocabulary", "block"),
    [(0, 128), (1, 128), (128, 128), (129, 256), (4096, 4096), (4097, 4096), (VOCABULARY, 4096)],
)
def test_blocks_fit_the_vocabulary(vocabulary, block):
    assert launch.plan(GPU, torch.bfloat16, 64, vocabulary).rows.block == block


@pytest.mark.parametrize(
    ("dtype", "row_bytes"),
    [(torch.bfloat16, 6), (torch.float16, 4), (torch.float32, 4), (torch.float64, 8)],
    ids=str,
)
def test_a_chunk_takes_a_sixteenth_of_the_memory(machine, dtype, row_bytes):
    """Logits, and beside those of bfloat16 their exponentials."""
    machine("sm_90", gibibytes=16)
    rows = launch.plan(GPU, dtype, 64, VOCABULARY).chunk_rows
    assert rows * VOCABULARY * row_bytes <= 1 << 30 < (rows + 1) * VOCABULARY * row_bytes


def test_a_fused_chunk_has_no_logits(machine, own):
    own('[sm_90.bfloat16]\nlogits = "fused"')
    machine("sm_90", gibibytes=16)
    plan = launch.plan(GPU, torch.bfloat16, 64, VOCABULARY)
    assert plan.fused
    assert plan.chunk_rows == (1 << 30) // (2 * VOCABULARY)


def test_even_one_row_too_large_is_a_chunk(machine):
    machine("sm_90", gibibytes=0)
    assert launch.plan(GPU, torch.bfloat16, 64, VOCABULARY).chunk_rows == 1


def test_the_most_specific_section_decides(own):
    own(
        """
        [default]
        rows = { warps = 2 }
        [sm_90]
        chunk_rows = 1000
        [sm_90.bfloat16]
        chunk_rows = 2000
        tile = { stages = 4 }
        [sm_90.bfloat16.wide]
        logits = "fused"
        chunk_rows = 3000
        [sm_89]
        chunk_rows = 500
        """
    )

    def plan(dtype, width):
        return launch.plan(GPU, dtype, width, VOCABULARY)

    assert plan(torch.float32, 4096).chunk_rows == 1000
    assert plan(torch.bfloat16, 2559).chunk_rows == 2000
    assert plan(torch.bfloat16, 2560).chunk_rows == 3000
    assert [plan(torch.bfloat16, width).fused for width in (2559, 2560)] == [False, True]
    shipped = launch.TABLE.read(launch.SHIPPED)["sm_90"]
    assert plan(torch.bfloat16, 64).tile == Tile(**{**shipped["tile"], "stages": 4})
    assert plan(torch.bfloat16, 64).rows == Launch(shipped["rows"]["block"], warps=2)


@pytest.mark.parametrize(
    ("text", "entry", "remedy"),
    [
        ("[sm_90", "", "expected a TOML file"),
        ("[hopper]\nchunk_rows = 1", "hopper: unknown architecture", "default, cpu, sm_NN or gfxNNN"),
        ("sm_90 = 3", "sm_90: it is 3", "a section"),
        ("[sm_90.bfloat17]", "sm_90.bfloat17: unknown key", "bfloat16, float16, float32, float64"),
        ("[sm_90.bfloat16.huge]", "sm_90.bfloat16.huge: unknown key", "narrow, wide"),
        ("[default.bfloat16]", "default.bfloat16: unknown key", "logits, chunk_rows, rows, tile"),
        ("[sm_90]\nblock = 128", "sm_90.block: unknown key", "logits, chunk_rows, rows, tile"),
        ("[sm_90]\nchunk_rows = 0", "sm_90.chunk_rows: it is 0", "a whole number from 1"),
        ("[sm_90]\nchunk_rows = true", "sm_90.chunk_rows: it is True", "a whole number from 1"),
        ("[sm_90]\nrows = 128", "sm_90.rows: it is 128", "block, warps"),
        ("[sm_90.float32]\nrows.block = 3000", "sm_90.float32.rows.block: it is 3000", "a power of two from 128"),
        ("[sm_90]\nrows = { warp = 8 }", "sm_90.rows.warp: unknown key", "block, warps"),
        ("[sm_90]\ntile.rows = 8", "sm_90.tile.rows: it is 8", "a power of two from 16"),
        ("[sm_90]\ntile.stages = 2.0", "sm_90.tile.stages: it is 2.0", "a whole number from 1 to 8"),
        ('[sm_90]\nlogits = "cublas"', "sm_90.logits: it is 'cublas'", "library or fused"),
        ('[sm_90]\nlogits = "fused"', "sm_90.logits: only 16-bit", "[sm_90.bfloat16] or [sm_90.float16]"),
        ('[sm_90.float32.wide]\nlogits = "fused"', "sm_90.float32.wide.logits: only 16-bit", "library here"),
    ],
)
def test_a_malformed_table_is_one_clear_error(own, text, entry, remedy):
    path = own(text)
    with pytest.raises(ValueError, match="expected") as caught:
        launch.plan(GPU, torch.bfloat16, 64, VOCABULARY)
    message = str(caught.value)
    assert message.startswith(f"launch table {path}: {entry}")
    assert remedy in message


def test_a_table_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv(launch.ENVIRONMENT, str(tmp_path / "none.toml"))
    launch.forget()
    with pytest.raises(ValueError, match=r"none.toml.*expected a TOML file like"):
        launch.TABLE.sections()


class Machine:
    """A GPU on which a call takes as long as `seconds` of its plan says, and nothing is computed."""

    def __init__(self, monkeypatch, seconds, broken=lambda plan: False, wrong=lambda plan: False):
        self.seconds, self.broken, self.wrong = seconds, broken, wrong
        self.plans = []
        monkeypatch.setattr(Workload, "forward", lambda work: self.run(work))
        monkeypatch.setattr(Workload, "loss", lambda work, entropy_coef=0.0: self.run(work))

    def run(self, work):
        self.plan = launch.plan(GPU, work.hidden.dtype, work.hidden.shape[1], VOCABULARY)
        self.plans.append(self.plan)
        if self.broken(self.plan):
            raise RuntimeError("out of resource: shared memory\nand so on")
        return (torch.full((2,), -2.0 if self.wrong(self.plan) else -1.0),)

    def clock(self, call):
        call()
        return self.seconds(self.plan)


BEST_TILE = Tile(128, 256, 64, 8, 3)
SHAPES = [Shape(6000, 16, 4096), Shape(6000, 2560, 4096)]


def cost(plan):
    """Best: blocks of 2048 and 4 warps, BEST_TILE, fused, chunks of 4096."""
    rows = abs(math.log2(plan.rows.block / 2048)) + plan.rows.warps / 4
    return 1 + rows + 3 * (plan.tile != BEST_TILE) + 2 * (not plan.fused) + abs(plan.chunk_rows - 4096) / 4096


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """Tunes a made-up machine for bfloat16; gives the table's path."""

    def make(shape, dtype, device, backend):
        one = torch.ones(1)
        return Workload(torch.ones(1, shape.width, dtype=getattr(torch, dtype)), one, one, one, backend)

    monkeypatch.setattr(tune, "make_workload", make)
    monkeypatch.setattr(tune, "origin", lambda *_: ["Timed on nothing."])

    def run(machine, seconds=600.0):
        output = tmp_path / "tuned.toml"
        tune.tune(Tuner(GPU, machine.clock, time.monotonic() + seconds), ["bfloat16"], SHAPES, output)
        return output

    return run


def test_the_tuner_chooses_what_the_clock_says_and_its_table_reads_back(monkeypatch, tuned):
    output = tuned(Machine(monkeypatch, cost))
    with tune.laid_over(output):
        for shape in SHAPES:
            plan = launch.plan(GPU, torch.bfloat16, shape.width, VOCABULARY)
            assert plan == launch.Plan(fused=True, chunk_rows=4096, rows=Launch(2048, 4), tile=BEST_TILE)
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


def test_without_a_fused_product_the_library_stays(monkeypatch, tuned):
    output = tuned(Machine(monkeypatch, cost, broken=lambda plan: plan.fused))
    assert launch.TABLE.read(output)["sm_90"]["bfloat16"]["wide"]["logits"] == "library"
    assert "no candidate runs" in output.read_text()


def test_nothing_that_runs_is_an_error(monkeypatch, tuned):
    with pytest.raises(RuntimeError, match="no launch of the row kernels runs for bfloat16"):
        tuned(Machine(monkeypatch, cost, broken=lambda plan: True))


def test_without_time_everything_stays(monkeypatch, tuned):
    before = launch.setting("sm_90", "bfloat16", "wide")
    machine = Machine(monkeypatch, cost)
    output = tuned(machine, seconds=0.0)
    assert launch.TABLE.read(output)["sm_90"]["bfloat16"]["wide"] == before
    assert "no time left" in output.read_text()
    assert not machine.plans


def test_candidates_take_turns(monkeypatch, tuned):
    """One after the other within a round, so that a slow moment of the machine meets all of them."""
    order = []
    values = [1024, 2048, 4096]
    tuner = Tuner(GPU, lambda call: float(call()[0]), time.monotonic() + 600)

    def call():
        rows = launch.plan(GPU, torch.float32, 64, VOCABULARY).chunk_rows
        order.append(rows)
        return (torch.tensor(1.0),)

    entry = launch.setting("sm_90", "float32", "narrow")
    assert tuner.choose("chunk_rows", values, [call], "float32", entry) == 4096  # of equals the present one
    assert order == [4096, 1024, 2048] * (1 + tune.MOST_ROUNDS)


@pytest.mark.parametrize(("gain", "chosen"), [(0.005, 4096), (0.02, 2048)])
def test_noise_does_not_replace_the_present_value(gain, chosen):
    def seconds(call):
        return 1.0 - gain * (launch.plan(GPU, torch.float32, 64, VOCABULARY).chunk_rows == 2048)

    tuner = Tuner(GPU, seconds, time.monotonic() + 600)
    entry = launch.setting("sm_90", "float32", "narrow")
    assert tuner.choose("chunk_rows", [2048], [lambda: (torch.ones(1),)], "float32", entry) == chosen


def run_tuner(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "exgrpo.kernels.triton_chunks.tune", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_program_says_so(tmp_path):
    done = run_tuner("--output", str(tmp_path / "table.toml"), TRITON_INTERPRET="")
    assert done.returncode == 2
    assert done.stderr.startswith("error: nothing to tune here: it needs a GPU")
    assert not list(tmp_path.iterdir())


def test_a_bad_shape_is_refused():
    done = run_tuner("--shapes", "8,16")
    assert done.returncode == 2
    assert "'8,16' is no shape; expected T,D,V" in done.stderr


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
