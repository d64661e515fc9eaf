"""The doctor as a user starts it, and what it tells."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from exgrpo.tools.doctor import program
from exgrpo.tools.doctor.program import Options, all_checks, recipe_of
from exgrpo.tools.doctor.running import members
from exgrpo.train.common import process
from exgrpo.train.common.errors import ConfigError
from tests.train.launch import ROOT, environment, launch_module
from tests.train.run.test_ending import gone

PROGRAM = "exgrpo.tools.doctor"
PATIENCE = 300


@pytest.fixture
def temporary():
    """A folder with a short name."""
    with TemporaryDirectory(prefix="doctor", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_whole_run_on_the_cpu(tmp_path, temporary):
    output = tmp_path / "doctor.md"
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM, "--output", str(output)],
        cwd=ROOT,
        env={**environment(), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = output.read_text()
    rows = {line.split("|")[1].strip(): line for line in told.splitlines() if line.startswith("|")}
    for check in all_checks():
        assert "| ok |" in rows[check.name] or "| skipped |" in rows[check.name]
    must_run = {"versions", "disk", "memory", "kernels_torch", "collectives", "grading", "weights"}
    for name in (*must_run, "step_one", "step_all"):
        assert "| ok |" in rows[name]
    assert "of the bare products' speed" in rows["kernels_torch"]
    assert "gloo, 2 x cpu: right; " in rows["collectives"]
    assert "answers are right" in rows["weights"]
    assert "2 x cpu, bf16" in rows["step_all"]
    assert not list(temporary.glob("exgrpo_*"))  # torch has left its cache of compiled code


def test_a_part_that_fails_fails_the_run_and_the_text_tells_it(tmp_path):
    recipe, output = tmp_path / "recipe.yaml", tmp_path / "told.md"
    large = "policy: {path: Qwen/Qwen2.5-Math-7B, overrides: {intermediate_size: 10000000}}"
    for text, result, status in (
        (large, "failed | CPU memory: ", 1),
        ("steps: 3", "skipped | the recipe names no model", 0),
    ):
        recipe.write_text(text)
        done = launch_module(PROGRAM, "--recipe", str(recipe), "--only", "memory")
        assert done.returncode == status
        assert done.stdout.startswith("# exgrpo doctor: 0 ok, ")
        assert f"\n| memory | {result}" in done.stdout
        assert done.stderr == f"memory: {result.partition(' ')[0]} (1 of 1)\n"
    done = launch_module(PROGRAM, "--recipe", str(recipe), "--only", "memory", "--output", str(output))
    assert (done.returncode, done.stdout) == (0, f"0 ok, 0 failed, 1 skipped: {output}\n")
    assert output.read_text().startswith("# exgrpo doctor: 0 ok, 0 failed, 1 skipped\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "kernel_cpu"), "error: --only: there is no check 'kernel_cpu'; did you mean 'kernels_cpu'? There"),
        (("--onyl", "memory"), "error: unknown option --onyl; did you mean --only?"),
        (("--timeout", "0"), "error: command line: timeout: "),
        (("--recipe", "builtin:none"), "error: unknown recipe 'builtin:none'"),
        (("--output", "no/such/folder/file.md"), "error: --output: no/such/folder/file.md cannot be written"),
    ],
)
def test_mistakes_on_the_command_line_are_told_in_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(process, "stop_on_signals", lambda: None)  # the signals of this process are pytest's
    assert program.main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith(message)
    assert told.count("\n") == 1


def test_without_a_recipe_it_is_the_default_run_in_bf16_and_else_the_recipe(tmp_path):
    assert recipe_of(Options()).policy.path == "builtin:arithmetic"
    assert recipe_of(Options()).policy.dtype == "bf16"
    assert recipe_of(Options(recipe="builtin:colouring")).policy.dtype == "fp32"
    (tmp_path / "part.yaml").write_text("steps: 3")
    part = recipe_of(Options(recipe=tmp_path / "part.yaml"))
    assert (part.steps, part.policy.path, part.data.train) == (3, "", ("",))
    with pytest.raises(ConfigError, match="no such recipe"):
        recipe_of(Options(recipe=tmp_path / "none.yaml"))


def test_a_signal_ends_the_doctor_with_its_checks_and_shows_what_it_has_found(temporary):
    doctor = subprocess.Popen(
        [sys.executable, "-m", PROGRAM, "--only", "versions", "collectives"],
        cwd=ROOT,
        env={**environment(), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE
    children = Path(f"/proc/{doctor.pid}/task/{doctor.pid}/children")
    while not (group := children.read_text().split()) or len(members(int(group[0]))) < 2:  # `versions` has one process
        assert time.monotonic() < deadline, "no check has begun"
        time.sleep(0.05)
    processes = members(int(group[0]))
    doctor.send_signal(signal.SIGTERM)
    printed, told = doctor.communicate(timeout=PATIENCE)
    assert doctor.returncode == 130
    assert told == "versions: ok (1 of 2)\nstopped: the other checks were not done\n"
    assert "1 ok, 0 failed, 0 skipped" in printed
    assert "| versions | ok |" in printed
    assert all(gone(process) for process in processes)
    assert list(temporary.iterdir()) == []


def test_the_program_needs_no_torch():
    script = f"import sys, {PROGRAM}.program as p; p.all_checks(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_text_names_no_user(monkeypatch):
    monkeypatch.setattr(program.socket, "gethostname", lambda: "node17")
    monkeypatch.setattr(program, "_user", lambda: "alice")
    shown = {
        "cannot read /home/alice/recipe.yaml": "cannot read /home/<user>/recipe.yaml",
        "owner alice on node17:29500": "owner <user> on <host>:29500",
        "malice and node171 stay": "malice and node171 stay",
    }
    assert {told: program.anonymous(told) for told in shown} == shown
