"""Ranks that start warm: a server process has imported what each of them imports, and forks.

A rank needs eight seconds to import torch, transformers and DeepSpeed, and four more for vLLM, and the tests start a
hundred. `python -m tests.train.warm SOCKET OWNER MODULE ...` is the server of ranks that have these modules. All
processes of one run of the tests share it, and it ends after the process OWNER, which began that run. One request is
one line of JSON on a connection of its own; the answers are a line with the process id and, in the end, one with the
exit status.

Ranks of one server have one seed for the order of sets. What depends on that shows between runs of two servers, or of
one and of a launcher.
"""

import atexit
import fcntl
import gc
import json
import os
import re
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing import util
from pathlib import Path
from typing import Any

from exgrpo.train.config.recipe import parse_args

ROOT = Path(__file__).parents[2]
TRAINING = (
    *("exgrpo.train.run.loop", "exgrpo.train.reward.worker", "exgrpo.kernels.cpu_chunks.cpu_fused"),
    "torch.utils.tensorboard",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # which has torch's compiler imported
)
"""What a run imports, sooner or later."""
VLLM = (
    *("vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.async_llm", "vllm.v1.worker.cpu_worker"),
    *("vllm.v1.executor.multiproc_executor", "vllm.model_executor.models.llama"),
)
"""What vLLM's server and its engine import."""


class Rank:
    """A process that runs a script, with what tests use of `subprocess.Popen`.

    It leads a session and so a process group of its own.

    Args:
        words: the script, or -m and a module, and its arguments.
        environment: all of its environment.
        out: path of the file to which its standard output is appended.
        err: path of the file to which its standard error is appended.
        vllm: whether it has vLLM imported.
    """

    def __init__(
        self, words: list[str], environment: dict[str, str], out: Path, err: Path, *, vllm: bool = False
    ) -> None:
        self.args = words
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_server(TRAINING + VLLM if vllm else TRAINING))
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


def begin() -> None:
    """Give a run of the tests the folder of its servers, which the processes that it starts share."""
    folder = tempfile.mkdtemp(prefix="warm", dir="/tmp")  # the address of a socket has at most 107 characters
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["WARM_RANKS"], os.environ["WARM_OWNER"] = folder, str(os.getpid())


@cache
def _server(modules: tuple[str, ...]) -> str:
    """Return the address of the server of ranks with such modules; the first caller of a run of the tests starts it."""
    address = Path(os.environ["WARM_RANKS"], str(len(modules)))
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "tests.train.warm", str(address), os.environ["WARM_OWNER"], *modules]
    deadline = time.monotonic() + 600
    with address.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = (
            None if address.exists() else subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
        )
        while not address.exists():
            assert server.poll() is None, "the server of warm ranks has not started"
            assert time.monotonic() < deadline, "the server of warm ranks does not listen"
            time.sleep(0.05)
    return str(address)


def serve(address: str, owner: str, *modules: str) -> None:
    """Fork a rank for each request, until the owner has ended. In a rank it returns, when the script has ended."""
    before = dict(os.environ)
    for module in modules:
        with suppress(ModuleNotFoundError):  # vLLM 0.26 has not all of them
            import_module(module)
    parse_args([])  # it reads the types and descriptions of all options once
    gc.freeze()  # a rank's collections pass over what it has from here, which they would look through and copy
    by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address + ".new")
        server.listen()
        os.rename(address + ".new", address)  # it is there when it listens
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while _exists(int(owner)):
            if not select.select([server], [], [], 1)[0]:
                continue
            connection, _ = server.accept()
            with connection:
                if os.fork():
                    continue
                server.close()
                _attend(connection, by_imports)
                return


def _exists(process: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False


def _attend(connection: socket.socket, by_imports: dict[str, str]) -> None:
    """Read one request, fork its rank and report its end; in the child, become the rank."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    answers = connection.makefile("rw")
    request = json.loads(answers.readline())
    rank = os.fork()
    if not rank:
        connection.detach()
        request["environment"] = {**by_imports, **request["environment"]}
        _become(**request)
        return
    print(rank, file=answers, flush=True)
    status = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    print(status, file=answers, flush=True)
    os._exit(0)


def _become(words: list[str], environment: dict[str, str], out: str, err: str) -> Any:
    os.setsid()
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    _keep_fork_server()
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def _keep_fork_server() -> None:
    """Fork the process that becomes the rank's fork server of graders, which would import for seconds."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = os.fork()
    if not server:
        ours.close()
        code, numbers, *_ = socket.recv_fds(theirs, 1 << 16, 2)
        theirs.close()
        if code:  # the rank has not ended without it
            exec(re.sub(r"main\(\d+, \d+", "main({}, {}".format(*numbers), code.decode()))
        os._exit(0)
    theirs.close()
    spawn = util.spawnv_passfds

    def spawned(path: bytes, words: list[str], files: list[int]) -> int:
        if ours.fileno() < 0 or "multiprocessing.forkserver" not in words[-1]:
            return spawn(path, words, files)
        with ours:
            socket.send_fds(ours, [words[-1].encode()], files)
        return server

    util.spawnv_passfds = spawned


if __name__ == "__main__":
    serve(*sys.argv[1:])
