"""Hostile input of each kind, drawn by Hypothesis: one clear error, or the right result (docs/hostile_input.md).

`pytest tests/hostile --long --cases 10000 --hypothesis-seed 0` tries many. A problem is that of the simplest case that
has one, whose files stay in the folder that pytest shows.
"""

import faulthandler
import gc
import os
import shutil
import sys
from importlib import import_module
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from exgrpo.train.reward.worker import little_memory
from tests.hostile.judge import TRACEBACK, judged

pytestmark = [pytest.mark.timeout(0), pytest.mark.filterwarnings("ignore")]
SHARES = {"recipes": 240, "command_lines": 160, "rows": 250, "rewards": 30, "models": 90, "answers": 90, "kernels": 140}
"""Of 1000 cases; a case of a reward needs processes."""
KINDS = [pytest.param(kind, marks=[pytest.mark.long] * (kind == "rewards")) for kind in SHARES]
SECONDS = 150.0
"""A case that takes longer hangs: it ends the process, which first writes down where it is."""
MIB = 2**20
AT_ONCE = 768 * MIB
"""Bytes that a case may take: the largest inputs have 8 MiB, and Python's objects take some dozens for one of text."""
DRIFT = 384 * MIB
"""Bytes that all cases of a kind may leave behind together, those before not counted that import what all need."""
WARM = 10
LOUD = 16 * MIB
"""Characters that a case may print."""


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_input_is_one_clear_error_or_the_right_result(kind, request, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ways = import_module(f"tests.hostile.{kind}").WAYS
    cases = WARM + -(-request.config.getoption("--cases") * SHARES[kind] // sum(SHARES.values()))
    done = first = 0

    @hypothesis.settings(max_examples=cases, suppress_health_check=list(hypothesis.HealthCheck), database=None)
    @hypothesis.given(st.data())
    def each(data):
        nonlocal done, first
        folder = tmp_path / "files"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        trial = data.draw(st.sampled_from(ways))(data.draw, folder)
        faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.__stderr__)
        with little_memory(AT_ONCE):
            verdict = judged(trial)
        faulthandler.cancel_dump_traceback_later()
        assert not verdict.problems, f"{trial.what}: " + "\n".join(verdict.problems)
        printed = "".join(capfd.readouterr())
        assert TRACEBACK not in printed, trial.what
        assert len(printed) < LOUD, trial.what
        done += 1
        first = resident() if done == WARM else first

    each()
    gc.collect()
    assert resident() - first < DRIFT


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
