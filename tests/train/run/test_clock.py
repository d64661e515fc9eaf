"""A clock of the day that jumps by hours, forward and back, ten times a second."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.launch import MAIN, completed, environment, launch, launch_by_deepspeed
from tests.train.run.test_run import SMALL, untimed

COMPILER = shutil.which("cc")


@pytest.fixture
def jumping(tmp_path, monkeypatch):
    """Processes that are started have such a clock; it is the system's for C and Python alike."""
    if not COMPILER or not sys.platform.startswith("linux"):
        pytest.skip("a clock that jumps needs a C compiler and Linux")
    library = tmp_path / "jumps.so"
    source = Path(__file__).with_name("clock_jumps.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", f"-o{library}", str(source), "-ldl"], check=True)
    with monkeypatch.context() as patched:
        patched.setenv("LD_PRELOAD", library.name)  # a blank in a path would end it here
        patched.setenv("LD_LIBRARY_PATH", str(tmp_path), prepend=":")
        yield


def test_the_clock_jumps(jumping):
    program = "import time\nfor _ in range(20): print(time.time(), time.monotonic()); time.sleep(0.05)"
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    shown, steady = zip(*(map(float, line.split()) for line in printed.splitlines()), strict=True)
    assert max(shown) > time.time() + 1800
    assert min(shown) < time.time() - 1800
    assert list(steady) == sorted(steady)


SLOW = """
import time

def slow(response, gold):
    time.sleep(0.3)
    return 1.0

if __name__ == "__main__":
    from exgrpo.train.reward.pool import Grader

    with Grader("slow.py:slow", workers=2, time_limit=60) as grader:
        print(grader.grade([(str(number), "") for number in range(8)]))
"""


@pytest.mark.long
def test_an_answer_has_its_time_whatever_the_clock_says(jumping, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    program = [sys.executable, "slow.py"]
    done = subprocess.run(program, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    assert f"reward={(1.0,) * 8}, timed_out=0, failed=0" in done.stdout


@pytest.mark.long
def test_a_run_whose_clock_jumps_is_the_same(request, tmp_path):
    """Nothing waits, gives up or is chosen by the time of day."""
    options = (*SMALL[1:], "--steps=3", "--checkpoint.every=1", "--preflight=off")
    plain = launch(MAIN, *options, f"--output.folder={tmp_path / 'plain'}", ranks=2)
    assert plain.returncode == 0, plain.stderr
    request.getfixturevalue("jumping")
    completed(MAIN, *options, f"--output.folder={tmp_path / 'jumping'}", ranks=2, by=launch_by_deepspeed)
    assert untimed(tmp_path / "jumping" / "small") == untimed(tmp_path / "plain" / "small")
