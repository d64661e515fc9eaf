"""The doctor as a user starts it: whatever a check does is a finding, the others follow, and nothing of it stays."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from exgrpo.kernels import dispatch
from exgrpo.kernels.chunks.products import Products
from exgrpo.tools import checks, doctor
from exgrpo.tools.checks import CheckFailedError, Skipped
from exgrpo.tools.doctor import CHECKS, examine, run_check
from exgrpo.train.common import process
from exgrpo.train.config.recipe import to_yaml
from tests.programs import python, wait_for
from tests.tools import broken_checks
from tests.tools.broken_checks import PIDS, REMEDY
from tests.train.configs import configured
from tests.train.launch import ROOT, environment, launch_module
from tests.train.run.test_ending import gone

PROGRAM = "exgrpo.tools.doctor"
PATIENCE = 300
EXPECTED = {
    "crashes": ("failed", f"it ended by SIGSEGV without a finding: before the crash; {REMEDY}"),
    "measures": ("ok", "seed 41 in measures of rank None"),
    "fails": ("failed", "the number is 5 and not 4: take 4"),
    "skips": ("skipped", "there is no such device"),
    "raises": ("failed", f"it ended by exit status 1 without a finding: KeyError: 'missing'; {REMEDY}"),
    "vanishes": ("failed", f"it ended by exit status 0 without a finding; {REMEDY}"),
}


@pytest.fixture
def temporary():
    """A folder with a short name."""
    with TemporaryDirectory(prefix="doctor", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def broken(monkeypatch):
    """Checks are those of `broken_checks`."""
    monkeypatch.setattr(doctor, "CHILD", "tests.tools.broken_checks")
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setenv("RANK", "3")  # of a launcher above the doctor


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_whole_run_on_the_cpu(tmp_path, temporary):
    output = tmp_path / "doctor.md"
    how = {"cwd": ROOT, "env": {**environment(), "TMPDIR": str(temporary)}, "timeout": 1700}
    python("-m", PROGRAM, "--output", output, **how)
    rows = {line.split("|")[1].strip(): line for line in output.read_text().splitlines() if line.startswith("|")}
    for name in CHECKS:
        assert "| ok |" in rows[name] or "| skipped |" in rows[name]
    for name in ("versions", "kernels_torch", "step_one", "step_all"):
        assert "| ok |" in rows[name]
    assert "2 x cpu, bf16" in rows["step_all"]
    assert not list(temporary.glob("exgrpo_*"))  # torch has left its cache of compiled code


def test_a_part_that_cannot_be_tried_is_skipped_and_the_text_tells_it(tmp_path):
    output = tmp_path / "told.md"
    done = launch_module(PROGRAM, "--recipe", "builtin:colouring", "--only", "kernels_cuda", "--output", str(output))
    assert (done.returncode, done.stdout) == (0, f"0 ok, 0 failed, 1 skipped: {output}\n")
    assert done.stderr == "kernels_cuda: skipped (1 of 1)\n"
    assert output.read_text().startswith("# exgrpo doctor: 0 ok, 0 failed, 1 skipped\n")
    assert "\n| kernels_cuda | skipped | it needs a GPU" in output.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "kernel_cpu"), "error: --only: there is no check 'kernel_cpu'; there are versions, kernels_cpu, "),
        (("--timeout", "0"), "error: command line: timeout: "),
        (("--recipe", "builtin:none"), "error: unknown recipe 'builtin:none'"),
        (("--output", "no/such/folder/file.md"), "error: --output: no/such/folder/file.md cannot be written"),
    ],
)
def test_mistakes_on_the_command_line_are_told_in_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(process, "stop_on_signals", lambda: None)  # the signals of this process are pytest's
    assert doctor.main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith(message)
    assert told.count("\n") == 1


def test_the_program_needs_no_torch():
    script = f"import sys, {PROGRAM}; print('torch' in sys.modules)"
    assert python("-c", script, env=environment()) == "False\n"


def test_the_text_names_no_user(monkeypatch):
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "node17")
    monkeypatch.setattr(doctor.getpass, "getuser", lambda: "alice")
    shown = {
        "cannot read /home/alice/recipe.yaml": "cannot read /home/<user>/recipe.yaml",
        "owner alice on node17:29500": "owner <user> on <host>:29500",
        "malice and node171 stay": "malice and node171 stay",
    }
    assert {told: doctor.anonymous(told) for told in shown} == shown


@pytest.mark.usefixtures("broken")
def test_whatever_a_check_does_is_a_finding_and_the_others_follow(tmp_path, capsys):
    asked = {name: check for name, check in broken_checks.CHECKS.items() if name != "hangs"}
    found = {one.name: one for one in examine(asked, configured(seed=41), tmp_path, PATIENCE)}
    assert list(found) == list(asked)
    assert {name: (found[name].result, found[name].text) for name in EXPECTED} == EXPECTED
    assert "measures: ok (2 of 7)" in capsys.readouterr().err
    assert found["measures"].output == ()
    assert found["measures"].seconds > 0
    assert found["fails"].output == ("what it did before",)
    assert any("broken_checks.py" in line for line in found["raises"].output)
    assert found["leaves_a_process"].result == "ok"
    assert gone(int(found["leaves_a_process"].text))


@pytest.mark.usefixtures("broken")
def test_a_check_that_hangs_is_killed_with_its_processes(tmp_path, monkeypatch):
    recipe, folder = tmp_path / "recipe.yaml", tmp_path / "hangs"
    recipe.write_text(to_yaml(configured()))
    folder.mkdir()
    wait = subprocess.Popen.wait

    def wait_until_it_hangs(process, timeout=None):
        while timeout and not (folder / PIDS).exists():  # however long it takes to begin
            assert process.poll() is None
            time.sleep(0.05)
        return wait(process, 0.01 if timeout else None)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_until_it_hangs)
    found = run_check("hangs", REMEDY, recipe, folder, timeout=7)
    assert (found.result, found.text) == ("failed", f"it has not ended within 7 s; {REMEDY}; --timeout gives it longer")
    assert all(gone(pid) for pid in json.loads((folder / PIDS).read_text()))


def test_a_signal_ends_the_doctor_with_its_checks_and_shows_what_it_has_found(temporary):
    environ = {**environment(), "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "tests.tools.broken_checks", "--only", "skips", "hangs"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    program = subprocess.Popen(command, cwd=ROOT, env=environ, text=True, **pipes)
    wait_for(lambda: list(temporary.glob(f"exgrpo_*/hangs/{PIDS}")), seconds=PATIENCE)
    (found,) = temporary.glob(f"exgrpo_*/hangs/{PIDS}")
    children = json.loads(found.read_text())
    program.send_signal(signal.SIGTERM)
    printed, told = program.communicate(timeout=PATIENCE)
    assert program.returncode == 130
    assert told.splitlines()[-1] == "stopped: the other checks were not done"
    assert "0 failed" in printed
    assert "| skips | " in printed
    assert all(map(gone, children))
    assert not list(temporary.glob("exgrpo_*"))


def test_a_backend_that_computes_wrongly_fails_and_one_that_is_not_there_is_skipped(tmp_path, monkeypatch):
    assert set(checks.BACKENDS) == set(dispatch.BACKENDS)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(Skipped, match="GPU"):
        checks.check_backend("cuda", configured(), tmp_path)
    right = Products.hidden_gradient
    monkeypatch.setattr(Products, "hidden_gradient", lambda self, grad: 1.5 * right(self, grad))
    monkeypatch.setenv("EXGRPO_SELF_TEST", "0")  # which would leave the backend out at its first call
    with pytest.raises(CheckFailedError, match=r"gradients are wrong.*float32 [3-6]\.\de-01.*kernel_backend"):
        checks.check_backend("torch", configured(), tmp_path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"loss": None}, "the loss is nan"),
        ({"grad_norm": 0.0}, "norm of its gradient 0"),
        ({"skipped_updates": 1}, "skipped"),
        ({"skipped_updates": 1, "loss_scale": 2.0}, ""),
    ],
)
def test_a_step_without_finite_numbers_fails(changes, problem):
    found = checks.wrong_in({"skipped_updates": 0, "loss": 0.1, "grad_norm": 0.2, **changes})
    assert problem in found
    assert bool(found) == bool(problem)


def test_a_training_program_that_fails_is_told_with_its_error(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (tmp_path / checks.LOG).write_text("some line\nerror: no room: make some\nlast line\n")
    monkeypatch.setattr(checks.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 2))
    with pytest.raises(CheckFailedError, match=r"1 x cpu ended with status 2: error: no room: make some; look at"):
        checks.check_step(lambda: 1, None, configured(), tmp_path)
