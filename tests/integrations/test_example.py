"""examples/ as a user starts them, with small sizes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head_memory_shows_time_and_memory_saved(dtype):
    sizes = ["--tokens", "512", "--hidden", "32", "--vocabulary", "30000", "--dtype", dtype, "--device", "cpu"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "head_memory.py", *sizes],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    full, fused = (
        int(re.search(rf"{name} +[\d,]+ ms +([\d,]+) MiB", done.stdout)[1]) for name in ("full logits", "fused")
    )
    assert full > 512 * 30000 * 4 / 2**20 > fused  # one matrix of logits in float32
    assert float(re.search(r"at most (\S+)\. ", done.stdout)[1]) < (1e-4 if dtype == "float32" else 0.1)
