"""One check in processes of its own, under a time limit; none of them stays.

The module is also the program of the first of them: `python -m exgrpo.tools.doctor.running RECIPE FOLDER PARENT`. Its
standard input is the function of the check, pickled by the doctor. Its standard output is one line of JSON, the
finding; all that libraries print goes to its standard error.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from exgrpo.tools.doctor.check import LOG, Check, Finding, Given, Skipped
from exgrpo.train.common.errors import SHOWN, ExgrpoError, cut
from exgrpo.train.common.process import end_group_with_parent, leave, run_program
from exgrpo.train.config.recipe import load_recipe

GRACE = 10.0
"""Seconds in which processes that are asked to end may clean up; then they are killed."""
LOOK_EVERY = 0.05
SHOWN_LINES = 25
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher says to its processes: of one above the doctor nothing is to be heard."""


def run_check(check: Check, recipe: Path, folder: Path, timeout: float) -> Finding:
    """Do a check in a process that leads a session of its own, and end all processes of that.

    Args:
        check: what to do.
        recipe: file with the configuration of the run that the machine is meant for.
        folder: an empty one.
        timeout: seconds for the check.
    """
    found = folder / "found"
    command = [sys.executable, "-m", "exgrpo.tools.doctor.running", *map(str, (recipe, folder, os.getpid()))]
    start = time.monotonic()
    with found.open("wb") as out, (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=log,
            env={name: value for name, value in os.environ.items() if name not in LAUNCHERS},
            start_new_session=True,
        )
        assert process.stdin is not None
        try:
            with suppress(BrokenPipeError), process.stdin as given:  # it may have ended already
                given.write(pickle.dumps(check.function))
            in_time = _wait(process.pid, start + timeout)
        finally:
            end_group(process.pid)
            status = process.wait()
    seconds = time.monotonic() - start
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    output = tuple(lines[-SHOWN_LINES:])
    if not in_time:
        text = f"it has not ended within {timeout:g} s. {check.remedy}; --timeout gives it longer"
        return Finding(check.name, "failed", text, seconds, output)
    line = found.read_text(encoding="utf-8")
    if status or not line:
        last = f": {cut(lines[-1].strip(), SHOWN)}" if lines else ""
        return Finding(check.name, "failed", f"{_ended(status)}{last}. {check.remedy}", seconds, output)
    said = json.loads(line)
    return Finding(check.name, said["result"], said["text"], seconds, output if said["result"] == "failed" else ())


def _wait(process: int, deadline: float) -> bool:
    """Whether a process ends in time. It stays to be waited for: until then, no other gets its number."""
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            return True
        time.sleep(LOOK_EVERY)
    return False


def _ended(status: int) -> str:
    if status >= 0:
        return f"it ended with exit status {status}" + ("" if status else " before it had a finding")
    name = signal.Signals(-status).name
    why = " (out of memory?)" if -status == signal.SIGKILL else ""
    return f"it was ended by {name}{why}"


def end_group(group: int) -> None:
    """End the processes of a group, whose leader was not waited for yet; `GRACE` seconds after SIGTERM by SIGKILL."""
    deadline, asked = time.monotonic() + GRACE, False
    while members(group):
        late = time.monotonic() > deadline
        if late or not asked:
            os.killpg(group, signal.SIGKILL if late else signal.SIGTERM)
            asked = True
        time.sleep(LOOK_EVERY)


def members(group: int) -> list[int]:
    """The processes of a group that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The second field is a name in parentheses, which may hold anything.
            state, _, its_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


def main(argv: Sequence[str]) -> int:
    """Do the check; the exit status is 0 where it has come to a finding."""
    recipe, folder = map(Path, argv[:2])
    end_group_with_parent(int(argv[2]))
    answer = os.dup(1)
    os.dup2(2, 1)

    def work(resources: ExitStack) -> None:
        try:
            said = "ok", pickle.load(sys.stdin.buffer)(Given(load_recipe(recipe), folder, resources))
        except Skipped as reason:
            said = "skipped", str(reason)
        except ExgrpoError as error:
            said = "failed", str(error)
        os.write(answer, json.dumps(dict(zip(("result", "text"), said, strict=True))).encode() + b"\n")

    return run_program(work, "the check was stopped")


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
