"""How a program ends from outside. Each is a process of its own: signals and parents belong to processes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from exgrpo.train.common import process as module

PATIENCE = 20.0


def runs(process: int) -> bool:
    """Whether a process runs: it is there, and not only to be asked for its exit status."""
    with suppress(FileNotFoundError, ProcessLookupError):  # it may end at any moment
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def gone(process: int) -> bool:
    """Whether a process has ended, at the latest after `PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    while runs(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not runs(process)


def python(script: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs a script; it says something on its standard output once it is ready."""
    return subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True)


STOPPED = """
import time
from exgrpo.train.common.process import stop_on_signals
stop_on_signals()
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("stopped", flush=True)
    time.sleep(0.2)  # signals that come during the clean-up are not heard
    print("cleaned up", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_once(number):
    process = python(STOPPED)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.stdout.readline() == "stopped\n"
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE)[0] == "cleaned up\n"
    assert process.returncode == 0


HANGING = """
import ctypes, threading
from exgrpo.train.common import process
process.GRACE = 0.3
process.stop_on_signals()
mutex = ctypes.create_string_buffer(64)  # of zeros: a lock that nobody holds, and no signal interrupts who waits for it
threading.Timer(0.3, print, ["ready"], {"flush": True}).start()  # by then this thread has hung for long
for _ in range(2):
    hang = ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def test_a_stopped_process_that_hangs_says_where_and_ends():
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    told = process.communicate(timeout=PATIENCE)[1]
    line = next(number for number, line in enumerate(HANGING.splitlines()) if "hang =" in line)
    assert process.returncode == 1
    assert "Timeout (0:00:00.300000)!" in told
    assert f'File "<string>", line {line + 1} in <module>' in told


FORKING = """
import os, signal, time
from exgrpo.train.common import process
process.GRACE = 0.3
process.stop_on_signals()
reads, writes = os.pipe()
child = os.fork()
if not child:
    try:
        os.write(writes, b".")
        time.sleep(60)
    except KeyboardInterrupt:
        os._exit(7)
os.read(reads, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
time.sleep(0.5)
print("lives on")
"""


def test_a_signal_to_a_forked_process_is_none_to_its_parent():
    process = python(FORKING)
    assert process.communicate(timeout=PATIENCE)[0] == "7\nlives on\n"
    assert process.returncode == 0


# A chain: `deepspeed`, the launcher, a rank; or a server with an engine, and a worker. The last one prints all ids.
LAST = """
import os, time
from exgrpo.train.common import process
process.LOOK_EVERY = 0.05
parent, top = os.getppid(), process._parent(os.getppid())
process.{watch}
print(os.getpid(), parent, top, flush=True)
time.sleep(60)
"""
RANK, WORKER = "end_with_launcher()", "end_with_ancestor(top)"
ABOVE = "import subprocess, sys; sys.exit(subprocess.Popen([sys.executable, *sys.argv[1:]]).wait())"


def chain(folder: Path, watch: str, launcher: str = "deepspeed.launcher.launch") -> list[int]:
    """Process ids of the last one, of that above it and of the first one."""
    script = folder / "deepspeed"
    script.write_text(ABOVE)
    command = [sys.executable, str(script), "-c", ABOVE, "-c", LAST.format(watch=watch), "-m", launcher]
    top = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return [int(word) for word in top.stdout.readline().split()]


@pytest.mark.parametrize("killed", [1, 2])
@pytest.mark.parametrize("watch", [RANK, WORKER])
def test_a_rank_ends_with_its_launcher_and_a_worker_with_its_server_and_so_does_what_is_between(
    tmp_path, watch, killed
):
    ids = chain(tmp_path, watch)
    os.kill(ids[killed], signal.SIGKILL)
    assert gone(ids[0])
    assert gone(ids[1])  # by itself, as its process has ended


def test_a_rank_ends_whose_launcher_was_gone_before_it_looked(monkeypatch):
    launcher = python("")
    launcher.wait(PATIENCE)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "exgrpo")
    monkeypatch.setenv("EXGRPO_LAUNCHER", str(launcher.pid))
    assert python(LAST.format(watch=RANK)).wait(PATIENCE) == -signal.SIGTERM


def test_a_process_without_this_launcher_outlives_its_parent(tmp_path):
    rank, parent, top = chain(tmp_path, RANK, launcher="another.launcher")
    os.kill(top, signal.SIGKILL)
    os.kill(parent, signal.SIGKILL)
    time.sleep(0.5)  # ten looks of one that would end
    assert runs(rank)
    os.kill(rank, signal.SIGKILL)


def test_a_process_that_is_no_ancestor_is_not_waited_for():
    stranger = python("import time; print('ready', flush=True); time.sleep(60)")
    script = f"""
import threading
from exgrpo.train.common import process
process.end_with_ancestor({stranger.pid})
print(threading.active_count())
"""
    threads, _ = python(script).communicate(timeout=PATIENCE)
    stranger.kill()
    assert threads == "1\n"


LEFT = """
import atexit, sys
from exgrpo.train.common.process import leave
class Late:
    def __del__(self):
        print("taken apart")
late = Late()
atexit.register(print, "cleaned up")
print("work done")
leave(int(sys.argv[1]))
"""


@pytest.mark.parametrize("status", [0, 2])
def test_a_program_leaves_after_its_clean_up_without_taking_the_interpreter_apart(status):
    process = python(LEFT, str(status))
    assert process.communicate(timeout=PATIENCE)[0] == "work done\ncleaned up\n"
    assert process.returncode == status


def test_help_that_nobody_reads():
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "exgrpo/train/main.py", "--help"]
    done = subprocess.run(command, cwd=Path(module.__file__).parents[3], stdout=writes, stderr=subprocess.PIPE)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, b"")
