"""The picture of README has the numbers of its record."""

import json
import re
from pathlib import Path

from benchmarks.render_head import ROWS, draw

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "2026-11-26_nvidia-h100-80gb-hbm3.json"
GROUP = "policy_loss bfloat16 8192x1536x151936"


def texts_of(picture: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)", picture.read_text())


def test_the_picture_has_the_times_and_the_memory_of_the_record(tmp_path):
    texts = texts_of(ROOT / "docs" / "policy_loss.svg")
    draw(RECORD, GROUP, tmp_path / "drawn.svg")
    assert texts == texts_of(tmp_path / "drawn.svg")
    record = json.loads(RECORD.read_text())
    rows = [row for row in record["rows"] if row["group"] == GROUP]
    rows = sorted((row for row in rows if row["row"] in ROWS), key=lambda row: row["median"], reverse=True)
    names, times = texts.index("Liger"), texts.index("243 (cut)")
    assert texts[names : names + len(rows)] == [ROWS[row["row"]] for row in rows]
    expected = [f"{row['median'] * 1e3:.1f}" for row in rows]
    assert texts[times : times + len(rows)] == ["243 (cut)", *expected[1:]]
    assert round(rows[0]["median"] * 1e3) == 243
    memory = texts.index("peak memory, GiB") - len(rows)
    assert texts[memory : memory + len(rows)] == [f"{row['peak_bytes'] / 2**30:.1f}" for row in rows]
    assert record["date"] in texts[-1]
    assert record["machine"]["device"] in texts[-1]
