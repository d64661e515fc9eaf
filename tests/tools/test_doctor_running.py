"""Checks in their processes: whatever they do there is a finding, the others follow, and nothing of them stays."""

import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from exgrpo.tools.doctor import running
from exgrpo.tools.doctor.check import Check
from exgrpo.tools.doctor.program import examine
from exgrpo.tools.doctor.running import members, run_check
from exgrpo.train.config.recipe import to_yaml
from tests.tools import broken_checks
from tests.train.configs import configured
from tests.train.launch import environment
from tests.train.run.test_ending import gone

PATIENCE = 300
REMEDY = "Do something else"
EXPECTED = {
    "crashes": ("failed", f"it was ended by SIGSEGV: before the crash. {REMEDY}"),
    "measures": ("ok", "seed 41 in measures of rank None"),
    "fails": ("failed", "the number is 5 and not 4. Take 4"),
    "skips": ("skipped", "there is no such device"),
    "raises": ("failed", f"it ended with exit status 1: KeyError: 'missing'. {REMEDY}"),
    "vanishes": ("failed", f"it ended with exit status 0 before it had a finding. {REMEDY}"),
}


def test_whatever_a_check_does_is_a_finding_and_the_others_follow(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setattr(running, "GRACE", 0.5)
    monkeypatch.setenv("RANK", "3")  # of a launcher above the doctor
    names = (*EXPECTED, "leaves_a_process")
    checks = [Check(name, getattr(broken_checks, name), REMEDY) for name in names]
    with (tmp_path / "progress").open("w") as progress:
        findings = list(examine(checks, configured(seed=41), tmp_path, PATIENCE, Console(file=progress)))
    found = {one.name: one for one in findings}
    assert tuple(found) == names
    assert {name: (found[name].result, found[name].text) for name in EXPECTED} == EXPECTED
    assert "measures: ok (2 of 7)" in (tmp_path / "progress").read_text()
    assert found["measures"].output == ()
    assert found["measures"].seconds > 0
    assert found["fails"].output == ("what it did before",)
    assert any("broken_checks.py" in line for line in found["raises"].output)
    assert found["leaves_a_process"].result == "ok"
    assert gone(int(found["leaves_a_process"].text))


def wait_for(path: Path) -> list[int]:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, "the check has not begun"
        time.sleep(0.05)
    return json.loads(path.read_text())


@pytest.fixture
def recipe(tmp_path):
    """A file of a recipe; beside it is an empty folder "hangs"."""
    (tmp_path / "hangs").mkdir()
    (tmp_path / "recipe.yaml").write_text(to_yaml(configured()))
    return tmp_path / "recipe.yaml"


def test_a_check_that_hangs_is_killed_with_its_processes(recipe, tmp_path, monkeypatch):
    pids = []

    def wait(process, deadline):
        pids.extend(wait_for(tmp_path / "hangs" / broken_checks.PIDS))
        return running_wait(process, time.monotonic())  # now, however long it has taken to begin

    running_wait = running._wait
    monkeypatch.setattr(running, "_wait", wait)
    monkeypatch.setattr(running, "GRACE", 0.5)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    found = run_check(Check("hangs", broken_checks.hangs, REMEDY), recipe, tmp_path / "hangs", timeout=7)
    assert (found.result, found.text) == (
        "failed",
        f"it has not ended within 7 s. {REMEDY}; --timeout gives it longer",
    )
    assert members(pids[0]) == []
    assert all(gone(pid) for pid in pids)
