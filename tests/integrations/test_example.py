"""examples/ as a user starts them, with small sizes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head_memory_shows_time_and_memory_saved(dtype):
    # More logits of answers than one chunk holds: the fused loss has one chunk of them in float32 at a time and, on a
    # processor that does not multiply 16-bit numbers into float32, a 16-bit copy of its gradients. Both together are
    # less than all of them. A narrow head: on such a processor the products of all logits are slow.
    sizes = ["--tokens", "1024", "--hidden", "8", "--vocabulary", "48000", "--dtype", dtype, "--device", "cpu"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "head_memory.py", *sizes],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    full, fused = (
        int(re.search(rf"{name} +[\d,]+ ms +([\d,]+) MiB", done.stdout)[1]) for name in ("full logits", "fused")
    )
    assert full > 1024 * 48000 * 4 / 2**20 > fused  # one matrix of logits in float32
    assert float(re.search(r"at most (\S+)\. ", done.stdout)[1]) < (1e-4 if dtype == "float32" else 0.1)
