"""What a run without options collects, its summary, the picture of README, and a step of the measured experience."""

import json
import re
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from benchmarks import render_head, summary
from benchmarks import test_experience as benchmark
from benchmarks.conftest import pytest_ignore_collect
from benchmarks.timing import PLAIN

OURS, PEER = "exgrpo cpu", "a peer"
LOSS, FORWARD = (f"{operation} float32 512x896x32000" for operation in ("policy_loss", "forward"))


@pytest.mark.parametrize(
    ("file", "sizes", "argument", "ignored"),
    [
        ("test_head.py", "small", "benchmarks/", False),
        ("test_training_step.py", "small", "benchmarks/", False),
        ("test_kept.py", "small", "benchmarks/", True),
        ("test_kept.py", "small", "benchmarks/test_kept.py::test_kept", False),
        ("test_kept.py", "full", "benchmarks/", False),
        ("conftest.py", "small", "benchmarks/", False),
    ],
)
def test_other_files_run_if_they_are_named_or_with_all_sizes(file, sizes, argument, ignored):
    config = SimpleNamespace(args=[argument], getoption=lambda _: sizes)
    assert bool(pytest_ignore_collect(Path("benchmarks") / file, config)) == ignored


def head(group, name, median, peak=None, **facts):
    peak = {} if peak is None else {"peak_bytes": peak << 20}
    return {"group": group, "row": name, "median": median, "times_ours": median / 0.5, **peak, **facts}


def step(name, ratio):
    ratios = {"times_trl": (ratio, ratio, ratio), "memory_times_trl": 0.7}
    group = "training step: default run, in turn"
    return {"group": group, "row": name, "median": ratio, "peak_bytes": 1 << 30, **ratios}


ROWS = [
    head(LOSS, "floor", 0.4),
    head(LOSS, PLAIN, 0.8, 600),
    head(LOSS, PEER, 0.625, 150, wrong=True),
    head(LOSS, OURS, 0.5, 60, floor_over_time=0.8),
    head(FORWARD, OURS, 0.5, 1),
    head(LOSS, "slow", 2.0, 1),
    head(FORWARD, "slow", 0.1, 1),
    step("trl", 1.0),
    step("on-policy", 0.44),
]


def test_the_summary_answers_in_words():
    assert all(map(summary.summarised, ROWS))
    assert not summary.summarised(head(f"scaling of T: {LOSS}", OURS, 1.0))
    assert list(summary.sentences(ROWS, OURS)) == [
        "512 tokens, width 896, vocabulary 32,000, float32: the policy loss takes 0.62 of the time of full logits and"
        " 1/10 of the memory; 0.80 of the time of the fastest other, a peer, and 0.40 of the memory.",
        "Training step: default run: on-policy takes 0.44 of the time and 0.70 of the memory of TRL's GRPOTrainer.",
    ]
    assert not list(summary.sentences([ROWS[0], ROWS[1]], OURS))


def test_the_tables_have_each_row_once_with_its_numbers():
    console = Console(file=StringIO(), width=150)
    for table in summary.tables(ROWS):
        console.print(table)
    lines = console.file.getvalue().splitlines()
    (ours,) = (line for line in lines if OURS in line)
    assert [cell.strip() for cell in ours.split("│")[1:-1]] == [
        *(OURS, "500 ms", "1.00", "0.80", "60", "500 ms", "1.00", ""),
    ]
    assert any(f"{PEER} WRONG" in line for line in lines)
    assert sum("trl" in line for line in lines) == 1
    assert not any("floor " in line and "400 ms" in line for line in lines)


ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "2026-11-26_nvidia-h100-80gb-hbm3.json"
GROUP = "policy_loss bfloat16 8192x1536x151936"


def texts_of(picture: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)", picture.read_text())


def test_the_picture_has_the_times_and_the_memory_of_the_record(tmp_path):
    texts = texts_of(ROOT / "docs" / "policy_loss.svg")
    render_head.draw(RECORD, GROUP, tmp_path / "drawn.svg")
    assert texts == texts_of(tmp_path / "drawn.svg")
    record = json.loads(RECORD.read_text())
    rows = [row for row in record["rows"] if row["group"] == GROUP]
    rows = sorted((row for row in rows if row["row"] in render_head.ROWS), key=lambda row: row["median"], reverse=True)
    names, times = texts.index("Liger"), texts.index("243 (cut)")
    assert texts[names : names + len(rows)] == [render_head.ROWS[row["row"]] for row in rows]
    expected = [f"{row['median'] * 1e3:.1f}" for row in rows]
    assert texts[times : times + len(rows)] == ["243 (cut)", *expected[1:]]
    assert round(rows[0]["median"] * 1e3) == 243
    memory = texts.index("peak memory, GiB") - len(rows)
    assert texts[memory : memory + len(rows)] == [f"{row['peak_bytes'] / 2**30:.1f}" for row in rows]
    assert record["date"] in texts[-1]
    assert record["machine"]["device"] in texts[-1]


@pytest.mark.parametrize("method", benchmark.METHODS)
def test_each_method_makes_a_step(method, monkeypatch):
    monkeypatch.setattr(benchmark, "SIZE", 1600)
    experience = benchmark.Experience(method)
    assert experience.plan()
    batch = experience.store(experience.batch())
    assert experience.settle(batch).groups >= batch.groups
