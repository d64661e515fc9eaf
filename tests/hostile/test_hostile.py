"""A short run of the program of hostile input."""

import re
import subprocess
import sys

import pytest

from tests.hostile.__main__ import SHARES
from tests.train.launch import environment
from tests.train.warm import ROOT


@pytest.mark.long
def test_a_short_run_finds_nothing(tmp_path):
    words = (sys.executable, "-m", "tests.hostile", "--seed=7", "--cases=40", f"--folder={tmp_path}")
    run = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert all(re.search(rf"{kind} +│ [1-9]", run.stdout) for kind in SHARES), run.stdout
