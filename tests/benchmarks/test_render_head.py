"""The picture of README has the numbers of its record."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "2026-11-26_nvidia-h100-80gb-hbm3.json"
NAMES = {
    "exgrpo cuda": "exgrpo",
    "Cut Cross-Entropy": "Cut Cross-Entropy",
    "TRL chunked log-prob": "TRL",
    "full logits, compiled": "full logits, compiled",
    "full logits": "full logits",
    "verl Triton": "verl",
    "Liger fused linear GRPO": "Liger",
}


def test_the_picture_has_the_times_and_the_memory_of_the_record():
    texts = re.findall(r"<text[^>]*>([^<]*)", (ROOT / "docs" / "policy_loss.svg").read_text())
    record = json.loads(RECORD.read_text())
    rows = [row for row in record["rows"] if row["group"] == "policy_loss bfloat16 8192x1536x151936"]
    rows = sorted((row for row in rows if row["row"] in NAMES), key=lambda row: row["median"], reverse=True)
    names, times = texts.index("Liger"), texts.index("243 (cut)")
    assert texts[names : names + len(rows)] == [NAMES[row["row"]] for row in rows]
    expected = [f"{row['median'] * 1e3:.1f}" for row in rows]
    assert texts[times : times + len(rows)] == ["243 (cut)", *expected[1:]]
    assert round(rows[0]["median"] * 1e3) == 243
    memory = texts.index("peak memory, GiB") - len(rows)
    assert texts[memory : memory + len(rows)] == [f"{row['peak_bytes'] / 2**30:.1f}" for row in rows]
    assert record["date"] in texts[-1]
    assert record["machine"]["device"] in texts[-1]
