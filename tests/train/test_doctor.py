"""The doctor as a user starts it, and what it tells."""

import io
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from rich.console import Console

import exgrpo
from exgrpo.train.doctor import program
from exgrpo.train.doctor.check import Check, Finding
from exgrpo.train.doctor.program import Options, all_checks, chosen, parse_options, recipe_of
from exgrpo.train.doctor.running import members
from exgrpo.train.errors import ConfigError
from exgrpo.train.process import Stopped
from tests.train import broken_checks
from tests.train.launch import ROOT, environment, launch_module
from tests.train.test_ending import gone

PROGRAM = "exgrpo.train.doctor"
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
    for name in (*must_run, "zero3_one", "zero3_all"):
        assert "| ok |" in rows[name]
    assert "gloo, 2 x cpu: right; " in rows["collectives"]
    assert "2 x cpu, bf16" in rows["zero3_all"]
    assert str(tmp_path) not in told
    assert str(temporary) not in told
    assert list(home.iterdir()) == []
    assert list(temporary.iterdir()) == []


def test_a_part_that_fails_fails_the_run_and_the_others_go_on(tmp_path, monkeypatch):
    checks = [
        Check(name, getattr(broken_checks, name), 1, "Do something else")
        for name in ("crashes", "measures", "fails", "skips")
    ]
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    with (tmp_path / "progress").open("w") as file:
        found = list(program.examine(checks, recipe_of(Options()), tmp_path, PATIENCE, Console(file=file)))
    assert [(one.name, one.result) for one in found] == [
        ("crashes", "failed"),
        ("measures", "ok"),
        ("fails", "failed"),
        ("skips", "skipped"),
    ]
    assert "measures: ok (2 of 4)" in (tmp_path / "progress").read_text()


@pytest.mark.parametrize(("results", "status"), [(["ok", "skipped"], 0), (["ok", "failed"], 1)])
def test_the_exit_status_is_0_only_where_nothing_failed(monkeypatch, capsys, results, status):
    found = [Finding(f"check{i}", result, "text", 1.0) for i, result in enumerate(results)]
    monkeypatch.setattr(program, "run_program", lambda work, stopped: work(program.ExitStack()) or 0)
    monkeypatch.setattr(program, "examine", lambda *_: found)
    assert program.main(["--only", "disk"]) == status
    told = capsys.readouterr().out
    assert "│ check0 " in told
    assert "| check1 | " in told  # the text, too, as no file is named for it


def test_who_stops_it_sees_what_it_has_found(monkeypatch, capsys):
    def stopped(*_):
        yield Finding("disk", "ok", "text", 1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "run_program", lambda work, stopped: work(program.ExitStack()))
    monkeypatch.setattr(program, "examine", stopped)
    with pytest.raises(Stopped, match="what is left is done by --only versions grading$"):
        program.main(["--only", "disk", "grading", "versions"])
    told = capsys.readouterr().out
    assert "1 ok, 0 failed, 0 skipped" in told
    assert "| disk | ok |" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--only", "kernel_cpu"),
            "error: --only: there is no check 'kernel_cpu'; did you mean 'kernels_cpu'? There are ",
        ),
        (("--skip", "x"), "error: --skip: there is no check 'x'; "),
        (("--only", "disk", "--skip", "disk"), "error: --only and --skip leave no check"),
        (("--onyl", "disk"), "error: unknown option --onyl; did you mean --only?"),
        (("--timeout", "0"), "error: command line: timeout: "),
        (("--recipe", "builtin:none"), "error: unknown recipe 'builtin:none'"),
        (("--output", "no/such/folder/file.md"), "error: --output: no/such/folder/file.md cannot be written"),
    ],
)
def test_mistakes_on_the_command_line_are_told_in_one_line(arguments, message):
    done = launch_module(PROGRAM, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_names_choose_the_checks():
    checks = [Check(name, print, 0, "") for name in ("a", "b", "c")]

    def left(*arguments):
        return "".join(check.name for check in chosen(checks, parse_options(arguments)))

    assert left() == "abc"
    assert left("--only", "c", "a") == "ac"
    assert left("--skip", "b") == "ac"
    assert left("--only", "a", "b", "--skip", "b") == "a"


def test_without_a_recipe_it_is_the_default_run_in_bf16_and_else_the_recipe(tmp_path):
    assert recipe_of(Options()).policy.path == "builtin:arithmetic"
    assert recipe_of(Options()).policy.dtype == "bf16"
    assert recipe_of(Options(recipe="builtin:colouring")).policy.dtype == "fp32"
    (tmp_path / "part.yaml").write_text("steps: 3")
    part = recipe_of(Options(recipe=tmp_path / "part.yaml"))
    assert (part.steps, part.policy.path, part.data.train) == (3, "", ("",))
    with pytest.raises(ConfigError, match="no such recipe"):
        recipe_of(Options(recipe=tmp_path / "none.yaml"))


def test_a_signal_ends_the_doctor_with_its_checks(temporary):
    doctor = subprocess.Popen(
        [sys.executable, "-m", PROGRAM, "--only", "collectives"],
        cwd=ROOT,
        env={**environment(), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE
    children = Path(f"/proc/{doctor.pid}/task/{doctor.pid}/children")
    while not (group := children.read_text().split()) or len(members(int(group[0]))) < 2:
        assert time.monotonic() < deadline, "no check has begun"
        time.sleep(0.05)
    processes = members(int(group[0]))
    doctor.send_signal(signal.SIGTERM)
    _, told = doctor.communicate(timeout=PATIENCE)
    assert (doctor.returncode, told) == (130, "stopped: nothing has changed\n")
    assert all(gone(process) for process in processes)
    assert list(temporary.iterdir()) == []


def test_the_program_needs_no_torch():
    script = f"import sys, {PROGRAM}.program as p; p.all_checks(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


FOUND = [
    Finding("kernels_cuda", "skipped", "it needs a GPU", 2.0),
    Finding("zero3_all", "failed", "it ended | with [status] 1", 12.34, ("first line", "last line")),
]


def test_the_table_has_a_row_for_each_check():
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(program.table(FOUND))
    told = console.export_text()
    assert "│ kernels_cuda │ skipped │ it needs a GPU " in told
    assert "│ zero3_all    │ failed  │ it ended | with [status] 1 " in told
    assert "12.3 │" in told


def test_the_text_has_versions_hardware_checks_and_the_output_of_what_failed(tmp_path):
    told = program.text(FOUND, tmp_path)
    assert told.startswith("# exgrpo doctor: 0 ok, 1 failed, 1 skipped\n")
    for name in (
        "python 3.",
        "torch ",
        "deepspeed ",
        "transformers ",
        "cores to use",
        "GiB of memory free",
        "nvidia-smi",
    ):
        assert name in told
    assert "| kernels_cuda | skipped | it needs a GPU | 2.0 |\n" in told
    assert "| zero3_all | failed | it ended \\| with [status] 1 | 12.3 |\n" in told
    assert "Last output of zero3_all:\n\n```\nfirst line\nlast line\n```\n" in told


def test_the_text_names_no_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setattr(program.socket, "gethostname", lambda: "node17")
    monkeypatch.setattr(program, "_user", lambda: "alice")
    source = Path(exgrpo.__file__).parents[1]
    shown = {
        f"{tmp_path}/zero3_all/run": "<scratch>/zero3_all/run",
        f'File "{source}/exgrpo/train/run.py", line 3': 'File "<source>/exgrpo/train/run.py", line 3',
        f"{sys.prefix}/lib/x.py": "<python>/lib/x.py",
        "cannot read /home/alice/recipes/secret.yaml": "cannot read ~/recipes/secret.yaml",
        "in /data/alice/projects/model: no": "in …/model: no",
        "owner alice on node17:29500": "owner <user> on <host>:29500",
        "malice and node171 stay": "malice and node171 stay",
    }
    public = (
        "https://pytorch.org/get/started",
        "3/4 of the GPUs",
        "/proc/driver/nvidia/version",
        "exgrpo/train/main.py",
    )
    shown |= dict(zip(public, public, strict=True))
    for told, expected in shown.items():
        assert program.anonymous(told, tmp_path) == expected
