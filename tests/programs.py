"""Programs that tests start."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any


def ran(*command: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """A program that has ended, and what it printed."""
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **how)


def printed(*command: object, **how: Any) -> str:
    """What a program that must succeed printed."""
    done = ran(*command, **how)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def python(*arguments: object, **how: Any) -> str:
    """What Python printed, which must succeed."""
    return printed(sys.executable, *arguments, **how)


def wait_for(come: Callable[[], object], of: Sequence[subprocess.Popen[str]] = (), seconds: float = 240) -> None:
    """Wait until something is true; fail after these seconds, or once a program that brings it about has ended."""
    deadline = time.monotonic() + seconds
    while not come():
        for one in of:
            assert one.poll() is None, one.communicate()
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.05)
