"""One check in its processes: whatever it does there is a finding, and nothing of it stays."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from exgrpo.train.doctor import running
from exgrpo.train.doctor.check import Check
from exgrpo.train.doctor.running import members, run_check
from exgrpo.train.recipe import to_yaml
from tests.train import broken_checks
from tests.train.configs import configured
from tests.train.launch import ROOT, environment
from tests.train.test_ending import gone

PATIENCE = 300
REMEDY = "Do something else"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Do a check of `broken_checks`, in a folder of its name."""
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setattr(running, "GRACE", 0.5)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(configured(seed=41)))

    def do(function, timeout=PATIENCE):
        folder = tmp_path / function.__name__
        folder.mkdir()
        return run_check(Check(function.__name__, function, 1, REMEDY), recipe, folder, timeout)

    return do


def test_the_finding_is_what_the_check_gives_whatever_libraries_print(run):
    found = run(broken_checks.measures)
    assert (found.name, found.result, found.text) == ("measures", "ok", "seed 41 in measures")
    assert found.output == ()
    assert found.seconds > 0


def test_a_check_that_cannot_run_here_is_skipped_with_its_reason(run):
    found = run(broken_checks.skips)
    assert (found.result, found.text) == ("skipped", "there is no such device")


def test_a_check_that_fails_says_why_and_shows_its_output(run):
    found = run(broken_checks.fails)
    assert (found.result, found.text) == ("failed", "the number is 5 and not 4. Take 4")
    assert found.output == ("what it did before",)


def test_an_exception_is_a_failure_with_its_last_line_and_the_remedy(run):
    found = run(broken_checks.raises)
    assert (found.result, found.text) == ("failed", f"it ended with exit status 1: KeyError: 'missing'. {REMEDY}")
    assert any("broken_checks.py" in line for line in found.output)


def test_a_crash_is_a_failure_that_names_the_signal(run):
    found = run(broken_checks.crashes)
    assert found.result == "failed"
    assert found.text == f"it was ended by SIGSEGV: before the crash. {REMEDY}"


def test_a_process_that_ends_without_a_finding_is_a_failure(run):
    found = run(broken_checks.vanishes)
    assert (found.result, found.text) == ("failed", f"it ended with exit status 0 before it had a finding. {REMEDY}")


def test_what_a_check_leaves_running_is_ended(run):
    found = run(broken_checks.leaves_a_process)
    assert found.result == "ok"
    assert gone(int(found.text))


def wait_for(path: Path) -> list[int]:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, "the check has not begun"
        time.sleep(0.05)
    return json.loads(path.read_text())


def test_a_check_that_hangs_is_killed_with_its_processes_and_its_shared_memory(run, tmp_path, monkeypatch):
    pids = []

    def wait(process, deadline):
        pids.extend(wait_for(tmp_path / "hangs" / broken_checks.PIDS))
        assert Path(f"/dev/shm/exgrpo_test_{pids[0]}").exists()
        return running_wait(process, time.monotonic())  # now, however long it has taken to begin

    running_wait = running._wait
    monkeypatch.setattr(running, "_wait", wait)
    found = run(broken_checks.hangs, timeout=7)
    assert found.result == "failed"
    assert found.text == f"it has not ended within 7 s. {REMEDY}; --timeout gives it longer"
    assert members(pids[0]) == []
    assert all(gone(pid) for pid in pids)
    assert not Path(f"/dev/shm/exgrpo_test_{pids[0]}").exists()


def test_the_time_limit_is_that_of_the_clock():
    sleeper = subprocess.Popen(["sleep", "600"])
    assert not running._wait(sleeper.pid, time.monotonic() + 0.2)
    sleeper.kill()
    assert running._wait(sleeper.pid, time.monotonic() + PATIENCE)
    assert sleeper.wait() == -signal.SIGKILL  # it was left to be waited for


DOCTOR = """
import sys
from pathlib import Path
from exgrpo.train.doctor.check import Check
from exgrpo.train.doctor.running import run_check
from tests.train import broken_checks
run_check(Check("hangs", broken_checks.hangs, 1, ""), *map(Path, sys.argv[1:]), timeout=600)
"""


def test_a_check_ends_with_a_doctor_that_is_killed(tmp_path):
    recipe, folder = tmp_path / "recipe.yaml", tmp_path / "hangs"
    recipe.write_text(to_yaml(configured()))
    folder.mkdir()
    doctor = subprocess.Popen([sys.executable, "-c", DOCTOR, recipe, folder], cwd=ROOT, env=environment())
    pids = wait_for(folder / broken_checks.PIDS)
    doctor.kill()
    doctor.wait()
    assert all(gone(pid) for pid in pids)
    Path(f"/dev/shm/exgrpo_test_{pids[0]}").unlink()  # a doctor that is killed removes nothing


def test_temporary_files_go_where_a_socket_has_an_address(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/usual")
    assert running.environment(Path("/short"))["TMPDIR"] == "/short"
    assert running.environment(Path("/long" * 20))["TMPDIR"] == "/usual"


def test_libraries_write_into_the_folder_and_hear_of_no_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("HF_HOME", "/models")
    own = running.environment(tmp_path)
    assert own["HOME"] == own["XDG_CACHE_HOME"] == str(tmp_path)
    assert own["HF_HOME"] == "/models"
    assert "RANK" not in own
    monkeypatch.delenv("HF_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert running.environment(tmp_path)["HF_HOME"] == os.path.expanduser("~/.cache/huggingface")
