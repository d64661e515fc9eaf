"""The program for a GPU, on a CPU: parts run in their order, go on after a stop, and one that fails stops no other."""

import os
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks import gpu, predict, record
from benchmarks.gpu import PARTS, Part
from benchmarks.programs import ROOT
from benchmarks.render import markdown
from tests.programs import ran
from tests.train.run.test_ending import gone

# Within a test that pytest-xdist runs, pytest-benchmark would take the program for one of its workers.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}


def started(*arguments):
    without = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
    return ran(sys.executable, "-m", "benchmarks.gpu", *arguments, cwd=ROOT, env=without, timeout=1800)


def python(name, code, **fields):
    """A part that is a line of Python."""
    return Part(name, 1, f'python -c "{code}"', **fields)


def call(monkeypatch, folder, *parts, words=()):
    """The exit status of a rehearsal that has these parts alone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "PARTS", parts)
    return gpu.main(["--rehearse", "--output", str(folder), *words])


def written(folder):
    (path,) = folder.glob("*_cpu.json")
    assert path.with_suffix(".md").read_text() == markdown(record.read(path))
    return record.read(path)


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_a_rehearsal_leaves_everything_there_is_to_leave(tmp_path):
    done = started("--rehearse", "--output", str(tmp_path), "--minutes", "25")
    assert done.returncode == 0, done.stdout + done.stderr
    found = written(tmp_path)
    finished = {name for name, problem in gpu.problems(found).items() if not problem}
    assert finished == {part.name for part in PARTS if not part.missing()}
    assert {"floor", "exgrpo torch"} <= {row["row"] for row in found.rows}
    assert (tmp_path / "launch_table.txt").read_text().startswith('"cpu bfloat16 narrow": LaunchPlan(')
    again = started("--rehearse", "--output", str(tmp_path))  # nothing is left to do
    assert again.returncode == 0
    assert "at most" not in again.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_program_says_so(tmp_path, capsys):
    assert gpu.main(["--output", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err == "error: there is no CUDA device; --rehearse tries the parts on the CPU\n"
    assert not list(tmp_path.iterdir())


def test_every_part_has_a_command_that_can_be_written_down():
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert {need for part in PARTS for need in part.needs.split()} == gpu.REMEDIES.keys()
    for part in PARTS:
        for rehearse in (True, False):
            words = part.words(rehearse, Path("a folder/result"), 2.0)
            assert sys.executable in words
            assert ("a folder/result" in " ".join(words)) == bool(part.result)
            assert not any("{" in word for word in words)


def test_a_failing_part_leaves_its_reason_and_the_next_one_runs(monkeypatch, tmp_path):
    bad = python("bad", "print('one test | failed'); raise SystemExit(3)")
    good = python("good", "print('text')", result=".txt")
    late = python("late", "open('{result}', 'w').write('what it found')", result=".txt")
    assert call(monkeypatch, tmp_path, bad, good, late) == 1
    assert gpu.problems(written(tmp_path)) == {
        "bad": "exit status 3: one test | failed",
        "good": "it left no result",
        "late": "",
    }
    (page,) = tmp_path.glob("*_cpu.md")
    assert "| bad | exit status 3: one test \\| failed |" in page.read_text()
    assert "| late | finished |" in page.read_text()
    assert "````\nwhat it found\n````\n" in page.read_text()


def test_the_next_call_goes_on_and_what_failed_comes_last(monkeypatch, tmp_path, capsys):
    add = "open('{result}', 'a').write('x')"
    bad = python("bad", f"{add}; raise SystemExit(1)", result=".txt")
    good, late = (python(name, add, result=".txt") for name in ("good", "late"))
    call(monkeypatch, tmp_path, bad, good)
    before = (tmp_path / "good.txt").stat().st_mtime_ns
    capsys.readouterr()
    call(monkeypatch, tmp_path, bad, good, late)
    begun = [line.partition(",")[0] for line in capsys.readouterr().out.splitlines() if "at most" in line]
    assert begun == ["late", "bad"]
    assert (tmp_path / "good.txt").stat().st_mtime_ns == before
    call(monkeypatch, tmp_path, bad, good, late, words=["--parts", "good"])  # run again, and nothing is left of before
    assert (tmp_path / "good.txt").stat().st_mtime_ns > before
    assert (tmp_path / "good.txt").read_text() == "x"
    assert not gpu.begun(tmp_path, "another GPU").parts


@pytest.mark.parametrize("heeds", [True, False])
def test_a_part_ends_at_its_limit(heeds, monkeypatch, tmp_path):
    """By an interrupt, at which pytest still writes its report, or else killed."""
    monkeypatch.setattr(gpu, "GRACE", 60.0 if heeds else 1.0)
    ignore = "" if heeds else "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    assert gpu.run([sys.executable, "-c", f"{ignore}import time; time.sleep(60)"], {}, 5.0, tmp_path / "log") is None
    assert ("KeyboardInterrupt" in (tmp_path / "log").read_text()) == heeds
    assert gpu.problem_of(python("a", ""), None, tmp_path / "a", tmp_path / "log").startswith("its time was up: ")


def test_what_a_part_has_started_ends_with_it(tmp_path):
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    assert gpu.run([sys.executable, "-c", f"{child}; print(p.pid)"], {}, 30.0, tmp_path / "log") == 0
    assert gone(int((tmp_path / "log").read_text()))


@pytest.mark.parametrize("size", predict.SIZES, ids=str)
@pytest.mark.parametrize("operation", predict.OPERATIONS)
def test_the_plans_of_today_are_predicted_to_be_no_slower(operation, size):
    """By a model that fits the records within a tenth."""
    before, after = (predict.plan_of(operation, size, after=after) for after in (False, True))
    time = predict.seconds(operation, size, before, after=False)
    assert predict.seconds(operation, size, after, after=True) <= time
    assert bool(after[1]) == operation.startswith("log_prob")
    assert all(0.9 < ratio < 1.1 for ratio in predict.errors())
