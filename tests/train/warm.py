"""Ranks that start warm: a server process has imported what each of them imports, and forks.

A rank needs six seconds to import torch, transformers and DeepSpeed, and the tests start a hundred. `python -m
tests.train.warm SOCKET` is the server; it ends when its standard input does. One request is one line of JSON on a
connection of its own; the answers are a line with the process id and, in the end, one with the exit status.

Ranks of one server have one seed for the order of sets. What depends on that shows between runs of two servers, or of
one and of a launcher.
"""

import atexit
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Rank:
    """A process that runs a script, with what tests use of `subprocess.Popen`.

    Args:
        words: the script and its arguments.
        environment: all of its environment.
        out: path of the file to which its standard output is appended.
        err: path of the file to which its standard error is appended.
    """

    def __init__(self, words: list[str], environment: dict[str, str], out: Path, err: Path) -> None:
        self.args = words
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_server())
        request = {"words": words, "environment": environment, "out": str(out), "err": str(err)}
        self._answers = self._connection.makefile("rw")
        self._answers.write(json.dumps(request) + "\n")
        self._answers.flush()
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        """The exit status, None while it runs; the negative number of the signal that has ended it."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.returncode = int(self._answers.readline())
            self._connection.close()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit status, once it has ended."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


@cache
def _server() -> str:
    """The address of this process's server, which is started at the first call."""
    folder = tempfile.mkdtemp(prefix="warm", dir="/tmp")  # the address of a socket has at most 107 characters
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address = f"{folder}/socket"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.train.warm", address], cwd=ROOT, env=environment, stdin=subprocess.PIPE
    )
    atexit.register(server.kill)
    deadline = time.monotonic() + 120
    while not Path(address).exists():
        assert server.poll() is None, "the server of warm ranks has not started"
        assert time.monotonic() < deadline, "the server of warm ranks does not listen"
        time.sleep(0.05)
    return address


def serve(address: str) -> None:
    """Fork a rank for each request, until the standard input ends. In a rank it returns, when the script has ended."""

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address + ".new")
        server.listen()
        os.rename(address + ".new", address)  # it is there when it listens
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while sys.stdin not in (ready := select.select([server, sys.stdin], [], [])[0]):
            connection, _ = ready[0].accept()
            with connection:
                if os.fork():
                    continue
                server.close()
                _attend(connection)
                return


def _attend(connection: socket.socket) -> None:
    """Read one request, fork its rank and tell what becomes of it; in the rank, become that."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    answers = connection.makefile("rw")
    request = json.loads(answers.readline())
    rank = os.fork()
    if not rank:
        connection.detach()
        _become(**request)
        return
    print(rank, file=answers, flush=True)
    status = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    print(status, file=answers, flush=True)
    os._exit(0)


def _become(words: list[str], environment: dict[str, str], out: str, err: str) -> Any:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
