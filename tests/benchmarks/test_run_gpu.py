"""The command for GPU machines, on a CPU: every phase runs, and one that fails is reported and stops no other."""

import io
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks import record, run_gpu
from benchmarks.run_gpu import Phase, Session
from exgrpo.kernels.triton_chunks import launch
from tests.benchmarks.support import ENVIRONMENT

ROOT = Path(__file__).parents[2]


def program(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.run_gpu", *arguments],
        cwd=ROOT,
        env={**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def session(*names, seconds=600.0):
    return Session(io.StringIO(), time.monotonic() + seconds, list(names))


def python(code):
    return [sys.executable, "-c", code]


@pytest.mark.long
def test_a_dry_run_leaves_everything_there_is_to_leave(tmp_path):
    done = program("--dry-run", "--output", str(tmp_path), "--minutes", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name.split(".", 1)[1] for path in tmp_path.iterdir()} == {"json", "md", "svg", "launch.toml", "log"}
    (table,) = tmp_path.glob("*.launch.toml")
    assert "cpu" in launch.TABLE.read(table)
    (written,) = tmp_path.glob("*.json")
    assert {"floor", "exgrpo torch"} <= {row["row"] for row in record.read(written).rows}
    (log,) = tmp_path.glob("*.log")
    for name in ("test", "tune", "bench", "page"):
        assert [line for line in log.read_text().splitlines() if line.startswith(name) and line.endswith("succeeded")]
    assert str(ROOT) not in log.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_program_says_so(tmp_path):
    done = program("--output", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == "error: there is no CUDA device; --dry-run tries the phases on the CPU\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--phases", "test,race"], "unknown phase 'race'"), (["--wheels", "nowhere"], "there is no wheel in 'nowhere'")],
)
def test_bad_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        run_gpu.parse(arguments)
    assert message in capsys.readouterr().err


def test_phases_run_in_their_own_order():
    assert run_gpu.parse(["--phases", "bench,test"]).phases == ["test", "bench"]


def test_a_failing_phase_is_reported_and_the_next_one_runs():
    run = session("test", "tune")
    run.run(Phase("test", python("print('one test failed'); raise SystemExit(3)")))
    run.run(Phase("tune", python("import os; print(os.environ['SAID'])"), {"SAID": "the next one"}))
    assert run_gpu.summary(run) == 1
    said = run.log.getvalue()
    assert "one test failed\n== test: exit status 3\n" in said
    assert "the next one\n" in said
    assert [outcome.problem for outcome in run.outcomes] == ["exit status 3", ""]


def test_phases_that_succeed_are_a_success():
    run = session("test")
    run.run(Phase("test", python("")))
    assert run_gpu.summary(run) == 0


@pytest.mark.parametrize("heeds", [True, False])
def test_a_phase_ends_at_its_limit(heeds, monkeypatch):
    """By an interrupt, at which pytest still writes its report, or else killed."""
    monkeypatch.setattr(run_gpu, "GRACE", 1.0)
    code = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end:\n"
    code += (
        "    time.sleep(0.1)"
        if heeds
        else "    try:\n        time.sleep(60)\n    except KeyboardInterrupt:\n        pass"
    )
    run = session("test", seconds=1.0)
    run.run(Phase("test", python(code)))
    (outcome,) = run.outcomes
    assert outcome.problem
    assert outcome.seconds < 30


def test_time_that_a_phase_leaves_goes_to_the_next_ones():
    run = session("test", "bench", seconds=180.0)
    assert run.limit() == pytest.approx(80, abs=1)
    run.to_come.remove("test")
    assert run.limit() == pytest.approx(180, abs=1)


def test_files_whose_imports_are_missing_are_left_out(tmp_path):
    (tmp_path / "helper.py").write_text("import nowhere.at_all\n")
    file = tmp_path / "test_it.py"
    file.write_text(
        "import os\nimport torch.nn\nfrom . import helper\nfrom .helper import x\nfrom elsewhere import y\n"
    )
    assert run_gpu.missing_modules(file, sys.path) == {"nowhere.at_all", "elsewhere"}


def test_without_plugins_and_packages_the_rest_of_the_tests_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(run_gpu, "found", lambda module, path: module not in ("hypothesis", "pytest_timeout", "xdist"))
    run = session("test")
    command = run_gpu.test_command(run, sys.path, tmp_path, dry_run=False)
    assert "--ignore=tests/kernels/test_policy_loss.py" in command
    assert "skipped: tests/kernels/test_policy_loss.py needs hypothesis" in run.log.getvalue()
    done = subprocess.run(
        [*command, "-p", "no:timeout", "-p", "no:xdist", "--collect-only"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_reference.py" in done.stdout
    assert "test_policy_loss.py" not in done.stdout.replace("test_linear_policy_loss.py", "")


def test_wheels_are_installed_for_the_run_alone(tmp_path, monkeypatch):
    (tmp_path / "peer-1.whl").touch()
    ran = []
    monkeypatch.setattr(Session, "run", lambda self, phase: ran.append(phase))
    options = run_gpu.parse(["--wheels", str(tmp_path), "--phases", "bench", "--output", str(tmp_path)])
    run_gpu.run(options, session("wheels", "bench", "page"), "stem", tmp_path / "scratch")
    wheels, bench, _ = ran
    assert wheels.command[-1] == str(tmp_path / "peer-1.whl")
    assert {"--no-index", "--no-deps", str(tmp_path / "scratch" / "packages")} <= set(wheels.command)
    assert bench.environment["PYTHONPATH"].startswith(str(tmp_path / "scratch" / "packages"))
