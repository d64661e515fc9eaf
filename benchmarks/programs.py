"""Benchmarks that need a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
QUIET = ("--data.test", "None", "--output.trackers", "--output.save_model", "False")
"""Options of training for runs whose results nobody reads."""


def python_path() -> str:
    """PYTHONPATH of a program of these benchmarks: this checkout, then what the present environment names."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def answer_of(module: str, out: Path, *options: str) -> Any:
    """What `python -m MODULE OUT OPTIONS` writes to `out`, a JSON file."""
    done = subprocess.run(
        [sys.executable, "-m", module, str(out), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())
