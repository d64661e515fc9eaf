"""The day on a GPU, on a CPU: parts run in their order, go on after a stop, and one that fails stops no other."""

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks import record
from benchmarks.gpu_day import kernel_tests, needs, page, profile, program, runner
from benchmarks.gpu_day.finished import Done, Parts
from benchmarks.gpu_day.needs import missing_of
from benchmarks.gpu_day.parts import PARTS, Part
from benchmarks.gpu_day.program import Day
from benchmarks.gpu_day.runner import Log
from benchmarks.programs import ROOT
from benchmarks.render import markdown
from exgrpo.kernels.triton_chunks import launch

# Within a test that pytest-xdist runs, pytest-benchmark would take the program for one of its workers.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}


def started(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_day", *arguments],
        cwd=ROOT,
        env={**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.fixture
def day(tmp_path):
    """Gives a rehearsal of a minute."""
    return Day(tmp_path, "cpu", "abc+", True, time.monotonic() + 60, Log(io.StringIO()))


def python(name, code, **fields):
    """A part that is a line of Python."""
    return Part(name=name, title=f"title of {name}", command=f'python -c "{code}"', least=1, most=2, **fields)


def run(monkeypatch, day, *parts, named=False):
    """The exit status of a call with these parts alone."""
    monkeypatch.setattr(program, "PARTS", parts)
    return program.parts_of(day, parts, named)


def logged(day):
    return day.log.file.getvalue()


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_a_rehearsal_leaves_everything_there_is_to_leave(tmp_path):
    done = started("--rehearse", "--output", str(tmp_path), "--minutes", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    parts = Parts.read(tmp_path)
    finished = {part.name for part in PARTS if parts.finished(part.name, "cpu")}
    reasons = {part.name: [missing_of(need, sys.path) for need in part.needs] for part in PARTS}
    assert finished == {name for name, of_part in reasons.items() if not any(of_part)}
    (written,) = tmp_path.glob("*_cpu.json")
    assert {"floor", "exgrpo torch"} <= {row["row"] for row in record.read(written).rows}
    assert written.with_suffix(".md").read_text() == markdown(record.read(written))
    assert "cpu" in launch.TABLE.read(tmp_path / "launch_table.toml")
    assert str(ROOT) not in (tmp_path / "day.log").read_text()
    again = started("--rehearse", "--output", str(tmp_path))  # nothing is left to do
    assert again.returncode == 0
    assert "==" not in again.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_program_says_so(tmp_path):
    done = started("--output", str(tmp_path / "day"))
    assert done.returncode == 2
    assert done.stderr == "error: there is no CUDA device; --rehearse tries the parts on the CPU\n"
    assert not list(tmp_path.iterdir())


def test_bad_options_are_refused(capsys):
    with pytest.raises(SystemExit):
        program.parse(["--parts", "kernels,race"])
    assert "unknown part 'race'" in capsys.readouterr().err


def test_every_part_has_a_command_that_can_be_written_down():
    assert len({part.name for part in PARTS}) == len(PARTS)
    for part in PARTS:
        assert part.least <= part.most
        for rehearse in (True, False):
            words = part.words(rehearse, Path("a folder/result"), 2.0)
            assert words[0] == sys.executable
            assert ("a folder/result" in " ".join(words)) == bool(part.result)
            assert not any("{" in word for word in words)
        assert part.words(True, Path("x"), 1.0) != part.words(False, Path("x"), 1.0)


def test_a_folder_that_a_part_needs_is_looked_for(monkeypatch, tmp_path, day):
    monkeypatch.setattr(needs, "ROOT", tmp_path)
    part = python("study", "", needs=("models/taught",))
    assert run(monkeypatch, day, part) == 0
    assert "left out, needs models/taught: it is not there" in logged(day)
    (tmp_path / "models" / "taught").mkdir(parents=True)
    assert run(monkeypatch, day, part) == 0
    assert Parts.read(day.folder).finished("study", "cpu")


def test_a_failing_part_is_reported_and_the_next_one_runs(monkeypatch, day):
    bad = python("bad", "print('one test failed'); raise SystemExit(3)")
    good = python("good", "import os; print(os.environ['SAID'])", environment={"SAID": "the next one"})
    assert run(monkeypatch, day, bad, good) == 1
    assert "one test failed\n== bad: exit status 3\n" in logged(day)
    assert "the next one\n" in logged(day)
    parts = Parts.read(day.folder)
    assert [parts.finished(name, "cpu") for name in ("bad", "good")] == [False, True]
    (written,) = day.folder.glob("*_cpu.md")
    assert "| title of bad | exit status 3 |" in written.read_text()
    assert "| title of good | finished |" in written.read_text()


def test_the_next_call_goes_on_and_what_failed_comes_last(monkeypatch, day):
    add = "open('{result}', 'a').write('x')"
    parts = [
        python("bad", f"{add}; raise SystemExit(1)", result=".txt"),
        python("good", add, result=".txt"),
        python("late", add, result=".txt"),
    ]
    run(monkeypatch, day, *parts[:2])
    for device, order in (("cpu", ["late", "bad"]), ("another GPU", ["bad", "good", "late"])):
        assert [part.name for part in program.order(parts, Parts.read(day.folder), device)] == order
    before = (day.folder / "good.txt").stat().st_mtime_ns
    run(monkeypatch, day, *parts)
    assert (day.folder / "good.txt").stat().st_mtime_ns == before
    run(monkeypatch, day, *parts, named=True)  # parts that are named run again, and nothing is left of the last time
    assert (day.folder / "good.txt").stat().st_mtime_ns > before
    assert (day.folder / "good.txt").read_text() == "x"


def test_parts_that_have_no_time_are_left_for_the_next_call(monkeypatch, tmp_path):
    late = Day(tmp_path, "cpu", "", False, time.monotonic() + 30, Log(io.StringIO()))
    assert run(monkeypatch, late, python("long", "")) == 0
    assert "long                         not begun: it needs 1 minutes, and 0.5 are left\n" in logged(late)
    assert not Parts.read(tmp_path).done


@pytest.mark.parametrize("heeds", [True, False])
def test_a_part_ends_at_its_limit(heeds, monkeypatch, day):
    """By an interrupt, at which pytest still writes its report, or else killed."""
    monkeypatch.setattr(runner, "GRACE", 1.0)
    code = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end:\n"
    code += (
        "    time.sleep(0.1)"
        if heeds
        else "    try:\n        time.sleep(60)\n    except KeyboardInterrupt:\n        pass"
    )
    outcome = runner.run([sys.executable, "-c", code], {}, 1.0, day.log)
    assert outcome.problem == "its time was up after 1 s"
    assert outcome.seconds < 30


def test_what_a_part_has_started_ends_with_it(day):
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    outcome = runner.run([sys.executable, "-c", f"{child}; print(p.pid)"], {}, 30.0, day.log)
    assert not outcome.problem
    pid = logged(day).split()[-1]
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.05)


def test_the_record_has_the_rows_of_all_parts_and_who_was_left_out(tmp_path):
    machine = record.Machine("a GPU", "a processor", "AVX512", 2, "3.12.3", {"torch": "2.11.0"})

    def measured(name, date, left_out):
        rows = [{"group": name, "row": "floor", "median": 1.0}]
        record.write(record.Record(date, "abc", False, machine, rows, left_out), tmp_path / f"{name}.json")

    measured("first", "2026-11-26", {"quack": ["quack is not installed"]})
    measured("second", "2026-11-27", {"quack": ["quack is not installed"], "trl": ["second: OutOfMemoryError: 1 GiB"]})
    (tmp_path / "text.txt").write_text("what ncu said\n")
    parts = [python(name, "", result=end) for name, end in (("first", ".json"), ("second", ".json"), ("text", ".txt"))]
    done = Parts(tmp_path / "parts.json")
    for part in parts:
        done.note(part.name, Done("2026-11-26", "a GPU", "abc", 3.0))
    parts.append(python("later", ""))
    whole = page.record_of(parts, done, "a GPU", {}, tmp_path)
    assert whole.date == "2026-11-27"
    assert [row["group"] for row in whole.rows] == ["first", "second"]
    assert whole.left_out == {"quack": ["quack is not installed"], "trl": ["second: OutOfMemoryError: 1 GiB"]}
    text = markdown(whole)
    assert "- quack: quack is not installed\n" in text
    assert "````\nwhat ncu said\n````\n" in text
    assert "| title of later | not begun yet |" in text
    record.write(whole, tmp_path / "whole.json")
    assert markdown(record.read(tmp_path / "whole.json")) == text
    assert not page.record_of(parts, done, "another GPU", {}, tmp_path).rows


def test_without_plugins_and_packages_the_rest_of_the_tests_runs(tmp_path, monkeypatch, capsys):
    lacking = ("hypothesis", "pytest_timeout", "xdist")
    monkeypatch.setattr(kernel_tests, "found", lambda module, path: module not in lacking)
    command = kernel_tests.command(sys.path, tmp_path, quick=False)
    assert "--ignore=tests/kernels/test_policy_loss.py" in command
    assert "skipped: tests/kernels/test_policy_loss.py needs hypothesis" in capsys.readouterr().out
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


NCU = """#!/bin/sh
while [ "$1" != --call ] && [ $# -gt 0 ]; do shift; done
[ "$1" = --call ] || exit 9
cat <<'END'
{output}
END
"""
SUMMARY = "  product_kernel (132, 1, 1)x(384, 1, 1), Context 1, Stream 7, Device 0, CC 9.0\n    Duration us 900"


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (f"==PROF== Connected\n{SUMMARY}", ""),
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "ncu may not read the counters"),
        ("==WARNING== No kernels were profiled.", "no such kernel was launched"),
        ("nothing", "ncu printed no summary of a kernel"),
    ],
)
def test_a_profile_is_a_summary_or_a_reason(output, problem, tmp_path, monkeypatch, capsys):
    program_of_ncu = tmp_path / "ncu"
    program_of_ncu.write_text(NCU.format(output=output))
    program_of_ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert profile.main(["product", str(tmp_path / "out.txt"), "--tiny"]) == int(bool(problem))
    if problem:
        assert f"error: {problem}" in capsys.readouterr().out
        assert not (tmp_path / "out.txt").exists()
    else:
        assert (tmp_path / "out.txt").read_text() == SUMMARY + "\n"
