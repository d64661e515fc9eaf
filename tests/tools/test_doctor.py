"""The doctor as a user starts it, and what it tells."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import exgrpo
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
    home, output = tmp_path / "home", tmp_path / "doctor.md"
    home.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM, "--output", str(output)],
        cwd=ROOT,
        env={**environment(), "HOME": str(home), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = output.read_text()
    rows = {line.split("|")[1].strip(): line for line in told.splitlines() if line.startswith("|")}
    for check in all_checks():
        assert f"│ {check.name} " in done.stdout
        assert "| ok |" in rows[check.name] or "| skipped |" in rows[check.name]
    must_run = {"versions", "disk", "memory", "kernels_torch", "collectives", "grading", "agreement", "weights"}
    for name in (*must_run, "step_one", "step_all"):
        assert "| ok |" in rows[name]
    assert "gloo, 2 x cpu: right; " in rows["collectives"]
    assert "2 x cpu, bf16" in rows["step_all"]
    assert str(tmp_path) not in told
    assert str(temporary) not in told
    assert list(home.iterdir()) == []
    assert list(temporary.iterdir()) == []


def test_a_part_that_fails_fails_the_run_and_the_table_and_the_text_tell_it(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{output: {folder: /dev/null/runs}}")
    done = launch_module(PROGRAM, "--recipe", str(recipe), "--only", "disk", "memory")
    assert done.returncode == 1
    assert "│ disk   │ failed  │ output.folder: /dev/null/runs cannot be written" in done.stdout
    assert "0 ok, 1 failed, 1 skipped. To paste into a report:\n" in done.stdout
    assert "\n| memory | skipped | the recipe names no model" in done.stdout
    assert done.stderr == "disk: failed (1 of 2)\nmemory: skipped (2 of 2)\n"
    done = launch_module(
        PROGRAM,
        "--recipe",
        str(recipe),
        "--only",
        "disk",
        "memory",
        "--skip",
        "disk",
        "--output",
        str(tmp_path / "told"),
    )
    assert done.returncode == 0, "--only leaves the other checks out"
    assert f"To paste into a report: {tmp_path / 'told'}" in done.stdout.replace("\n", " ")
    assert (tmp_path / "told").read_text().startswith("# exgrpo doctor: 0 ok, 0 failed, 1 skipped\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "kernel_cpu"), "error: --only: there is no check 'kernel_cpu'; did you mean 'kernels_cpu'? There"),
        (("--skip", "x"), "error: --skip: there is no check 'x'; "),
        (("--only", "disk", "--skip", "disk"), "error: --only and --skip leave no check"),
        (("--onyl", "disk"), "error: unknown option --onyl; did you mean --only?"),
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
        [sys.executable, "-m", PROGRAM, "--only", "disk", "collectives"],
        cwd=ROOT,
        env={**environment(), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE
    children = Path(f"/proc/{doctor.pid}/task/{doctor.pid}/children")
    while not (group := children.read_text().split()) or len(members(int(group[0]))) < 2:  # `disk` has one process
        assert time.monotonic() < deadline, "no check has begun"
        time.sleep(0.05)
    processes = members(int(group[0]))
    doctor.send_signal(signal.SIGTERM)
    printed, told = doctor.communicate(timeout=PATIENCE)
    assert doctor.returncode == 130
    assert told == "disk: ok (1 of 2)\nstopped: what is left is done by --only collectives\n"
    assert "1 ok, 0 failed, 0 skipped" in printed
    assert "| disk | ok |" in printed
    assert all(gone(process) for process in processes)
    assert list(temporary.iterdir()) == []


def test_the_program_needs_no_torch():
    script = f"import sys, {PROGRAM}.program as p; p.all_checks(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_text_names_no_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setattr(program.socket, "gethostname", lambda: "node17")
    monkeypatch.setattr(program, "_user", lambda: "alice")
    source = Path(exgrpo.__file__).parents[1]
    shown = {
        f"{tmp_path}/step_all/run": "<scratch>/step_all/run",
        f'File "{source}/exgrpo/train/run/loop.py", line 3': 'File "<source>/exgrpo/train/run/loop.py", line 3',
        f"{sys.prefix}/lib/x.py": "<python>/lib/x.py",
        "cannot read /home/alice/recipes/secret.yaml": "cannot read ~/recipes/secret.yaml",
        "in /data/alice/projects/model: no": "in …/model: no",
        "owner alice on node17:29500": "owner <user> on <host>:29500",
        "malice and node171 stay": "malice and node171 stay",
    }
    public = ("https://pytorch.org/get/started", "3/4 of the GPUs", "/proc/driver/nvidia/version")
    for told, expected in (*shown.items(), *zip(public, public, strict=True)):
        assert program.anonymous(told, tmp_path) == expected
