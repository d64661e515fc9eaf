"""The launch table, without a GPU: made-up devices."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from exgrpo.kernels.chunks import chunking
from exgrpo.kernels.tables import DEFAULT, DTYPES
from exgrpo.kernels.triton_chunks import launch
from exgrpo.kernels.triton_chunks.launch import Launch, Tile

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
def test_every_machine_has_a_plan(machine, architecture):
    machine(architecture)
    for dtype, width in product(DTYPES, (64, 2559, 2560, 8192)):
        plan = launch.plan(GPU, getattr(torch, dtype), width, VOCABULARY)
        assert plan.fused == (architecture == "sm_90" and dtype in ("bfloat16", "float16"))  # no other was timed yet
        assert plan.rows.block.bit_count() == plan.rows.warps.bit_count() == 1
        assert 1 <= plan.chunk_rows <= (8192 if plan.fused else 4096)
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
    ("name", "older"),
    [("sm_86", "sm_80"), ("sm_87", "sm_80"), ("sm_89", "sm_80"), ("sm_103", "sm_100"), ("sm_121", "sm_120")],
)
def test_gpus_without_a_section_have_that_of_an_older_one_of_their_generation(name, older, own):
    for dtype, width_class in product(DTYPES, ("narrow", "wide")):
        assert launch.setting(name, dtype, width_class) == launch.setting(older, dtype, width_class)
    own(f"[{name}.bfloat16]\nchunk_rows = 77\n")
    assert launch.setting(name, "bfloat16", "wide") == launch.setting(older, "bfloat16", "wide") | {"chunk_rows": 77}
    assert launch.setting(older, "bfloat16", "wide")["chunk_rows"] != 77


@pytest.mark.parametrize(
    ("vocabulary", "block"),
    [(0, 128), (1, 128), (128, 128), (129, 256), (4096, 4096), (4097, 4096), (VOCABULARY, 4096)],
)
def test_blocks_fit_the_vocabulary(vocabulary, block):
    assert launch.plan(GPU, torch.bfloat16, 64, vocabulary).rows.block == block


@pytest.mark.parametrize(
    ("dtype", "row_bytes"), [(torch.bfloat16, 6), (torch.float16, 6), (torch.float32, 4), (torch.float64, 8)], ids=str
)
def test_a_chunk_takes_a_sixteenth_of_the_memory(machine, dtype, row_bytes):
    """Logits, and beside those of 16-bit operands their exponentials."""
    machine("sm_80", gibibytes=16)
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


def test_the_most_specific_section_decides(machine, own):
    machine("sm_100")
    own(
        """
        [default]
        rows = { warps = 2 }
        [sm_100]
        chunk_rows = 1000
        [sm_100.bfloat16]
        chunk_rows = 2000
        tile = { stages = 4 }
        [sm_100.bfloat16.wide]
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
    shipped = launch.TABLE.read(launch.SHIPPED)["sm_100"]
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
