"""What a run without options collects, the picture of README, and a step of the measured experience."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import render_head
from benchmarks import test_experience as benchmark
from benchmarks.conftest import pytest_ignore_collect


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
