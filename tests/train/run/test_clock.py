"""A clock of the day that jumps by hours, forward and back, ten times a second."""

import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.programs import printed, python
from tests.train.launch import MAIN, completed, launch_by_deepspeed
from tests.train.run.test_run import SMALL, untimed

COMPILER = shutil.which("cc")


@pytest.fixture
def jumping(tmp_path, monkeypatch):
    """Processes that are started have such a clock; it is the system's for C and Python alike."""
    if not COMPILER or not sys.platform.startswith("linux"):
        pytest.skip("a clock that jumps needs a C compiler and Linux")
    library = tmp_path / "jumps.so"
    source = Path(__file__).with_name("clock_jumps.c")
    printed(COMPILER, "-shared", "-fPIC", "-O1", f"-o{library}", source, "-ldl")
    with monkeypatch.context() as patched:
        patched.setenv("LD_PRELOAD", library.name)  # a blank in a path would end it here
        patched.setenv("LD_LIBRARY_PATH", str(tmp_path), prepend=":")
        yield


def test_the_clock_jumps(jumping):
    program = "import time\nfor _ in range(20): print(time.time(), time.monotonic()); time.sleep(0.05)"
    shown, steady = zip(*(map(float, line.split()) for line in python("-c", program).splitlines()), strict=True)
    assert max(shown) > time.time() + 1800
    assert min(shown) < time.time() - 1800
    assert list(steady) == sorted(steady)


SLOW = """
import time

def slow(response, gold):
    time.sleep(0.15)
    return float(gold in response)
"""


@pytest.mark.long
def test_a_run_whose_clock_jumps_is_the_same(request, tmp_path):
    """Nothing waits, gives up or is chosen by the time of day, which jumps while each answer is graded."""
    (tmp_path / "slow.py").write_text(SLOW)
    reward = f"--reward.function={tmp_path}/slow.py:slow"
    options = (*SMALL[1:], "--steps=3", "--checkpoint.every=1", "--preflight=off", reward)
    completed(MAIN, *options, f"--output.folder={tmp_path / 'plain'}", ranks=2)
    request.getfixturevalue("jumping")
    completed(MAIN, *options, f"--output.folder={tmp_path / 'jumping'}", ranks=2, by=launch_by_deepspeed)
    assert untimed(tmp_path / "jumping" / "small") == untimed(tmp_path / "plain" / "small")
