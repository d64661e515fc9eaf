"""The launch table, without a GPU: made-up devices."""

import re
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from exgrpo.kernels.chunks import chunking
from exgrpo.kernels.chunks.chunking import Cost
from exgrpo.kernels.chunks.products import row_cost
from exgrpo.kernels.tables import DTYPES
from exgrpo.kernels.triton_chunks import launch
from exgrpo.kernels.triton_chunks.launch import Launch, Tile
from exgrpo.kernels.triton_chunks.triton_passes import rows_of

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


@pytest.mark.parametrize("architecture", [*KNOWN, "cpu", "sm_75", "gfx1100"])
def test_every_machine_has_a_plan(machine, architecture):
    machine(architecture)
    for dtype, width in product(DTYPES, (64, 2559, 2560, 8192)):
        plan = launch.plan(GPU, getattr(torch, dtype), width, VOCABULARY)
        assert plan.fused == (architecture == "sm_90" and dtype in ("bfloat16", "float16"))  # no other was timed yet
        assert launch.plan(GPU, getattr(torch, dtype), width, 129).rows.block == 256
        assert plan.rows.block.bit_count() == plan.rows.warps.bit_count() == 1
        assert plan.memory == (16 << 20 if architecture == "cpu" else 1 << 30)
        assert all(number.bit_count() == 1 for number in (plan.tile.rows, plan.tile.columns, plan.tile.depth))
        operands = (plan.tile.rows + plan.tile.columns) * plan.tile.depth * 2 * plan.tile.stages
        assert operands <= SHARED_LIMIT.get(architecture, 48) << 10


@pytest.mark.parametrize(
    ("name", "older"), [("sm_86", "sm_80"), ("sm_89", "sm_80"), ("sm_103", "sm_100"), ("sm_121", "sm_120")]
)
def test_gpus_without_a_section_have_that_of_an_older_one_of_their_generation(name, older, launch_table):
    for dtype, width_class in product(DTYPES, ("narrow", "wide")):
        assert launch.setting(name, dtype, width_class) == launch.setting(older, dtype, width_class)
    launch_table(f"[{name}.bfloat16]\nmemory = 77\n")
    assert launch.setting(name, "bfloat16", "wide") == launch.setting(older, "bfloat16", "wide") | {"memory": 77}
    assert launch.setting(older, "bfloat16", "wide")["memory"] != 77


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
    plan = launch.Plan(fused=True, memory=1 << 30, rows=Launch(4096, 16), tile=Tile(128, 256, 64, 8, 4))
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


def test_the_most_specific_section_decides(machine, launch_table):
    machine("sm_100")
    launch_table(
        """
        [default]
        rows = { warps = 2 }
        [sm_100]
        memory = 1000
        [sm_100.bfloat16]
        memory = 2000
        tile = { stages = 4 }
        [sm_100.bfloat16.wide]
        logits = "fused"
        memory = 3000
        [sm_89]
        memory = 500
        """
    )

    def plan(dtype, width):
        return launch.plan(GPU, dtype, width, VOCABULARY)

    assert plan(torch.float32, 4096).memory == 1000 << 20
    assert plan(torch.bfloat16, 2559).memory == 2000 << 20
    assert plan(torch.bfloat16, 2560).memory == 3000 << 20
    assert [plan(torch.bfloat16, width).fused for width in (2559, 2560)] == [False, True]
    shipped = launch.TABLE.read(launch.SHIPPED)["sm_100"]
    assert plan(torch.bfloat16, 64).tile == Tile(**{**shipped["tile"], "stages": 4})
    assert plan(torch.bfloat16, 64).rows == Launch(shipped["rows"]["block"], warps=2)


@pytest.mark.parametrize(
    ("text", "entry", "remedy"),
    [
        ("[sm_90", "", "expected a TOML file"),
        ("sm_90 = 3", "sm_90: it is 3", "a section"),
        ("[sm_90.bfloat17]", "sm_90.bfloat17: unknown key", "bfloat16, float16, float32, float64"),
        ("[sm_90]\nmemory = 0", "sm_90.memory: it is 0", "a whole number from 1"),
        ("[sm_90.float32]\nrows.block = 3000", "sm_90.float32.rows.block: it is 3000", "a power of two from 128"),
        ("[sm_90]\nrows = { warp = 8 }", "sm_90.rows.warp: unknown key", "block, warps"),
        ('[sm_90]\nlogits = "cublas"', "sm_90.logits: it is 'cublas'", "library or fused"),
        ('[sm_90]\nlogits = "fused"', "sm_90.logits: only 16-bit", "[sm_90.bfloat16] or [sm_90.float16]"),
    ],
)
def test_a_malformed_table_is_one_clear_error(launch_table, text, entry, remedy):
    path = launch_table(text)
    with pytest.raises(ValueError, match=re.escape(f"launch table {path}: {entry}") + ".*" + re.escape(remedy)):
        launch.plan(GPU, torch.bfloat16, 64, VOCABULARY)
    with pytest.raises(ValueError, match=r"none.toml.*expected a TOML file like"):
        launch.TABLE.read(path.with_name("none.toml"))
