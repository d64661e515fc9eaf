"""Start scripts on several ranks, by the deepspeed launcher as a user does, or without it."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from exgrpo.train.common.process import GRACE
from tests.programs import ran
from tests.train.warm import ROOT, Rank

MAIN = ROOT / "exgrpo" / "train" / "main.py"


def free_port() -> int:
    """A port below those that the system hands out: no connection of another process can take it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def command(script: Path, *arguments: str, ranks: int = 1) -> list[str]:
    """The launcher's command line, with a free port of its own."""
    port = free_port()
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    return [launcher, f"--num_accelerators={ranks}", f"--master_port={port}", str(script), *arguments]


def environment() -> dict[str, str]:
    """This process's environment, on the CPU, with the project importable."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "DS_ACCELERATOR": "cpu", "COLUMNS": "200", "PYTHONPATH": path}


class Ranks:
    """A script on so many CPU ranks, as the launcher starts it: where one rank fails, the others are ended.

    Args:
        script: what every rank runs.
        arguments: of the script.
        ranks: how many.
        vllm: whether they have vLLM imported.
    """

    def __init__(self, script: Path, *arguments: str, ranks: int = 1, vllm: bool = False) -> None:
        folder = Path(mkdtemp(prefix="ranks"))
        self._out, self._err = folder / "out", folder / "err"
        for path in (self._out, self._err):
            path.touch()
        world = {"WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        self.ranks = []
        for rank in range(ranks):
            of_rank = {name: str(value) for name, value in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()}
            words = [str(script), f"--local_rank={rank}", *arguments]
            self.ranks.append(Rank(words, {**environment(), **of_rank}, self._out, self._err, vllm=vllm))

    def running(self) -> bool:
        """True if none has failed and one still runs."""
        statuses = [rank.poll() for rank in self.ranks]
        return None in statuses and not any(statuses)

    def finish(self, timeout: float = 540) -> subprocess.CompletedProcess[str]:
        """Wait for all to end; return their output, and the first exit status other than 0.

        Raises:
            TimeoutExpired: they have not ended in time; they are killed.
        """
        deadline = time.monotonic() + timeout
        try:
            while self.running() and time.monotonic() < deadline:
                time.sleep(0.02)
            status = next(filter(None, (rank.poll() for rank in self.ranks)), 0)
            for rank in self.ranks if status else ():
                rank.send(signal.SIGTERM)
            for rank in self.ranks:
                rank.wait(2 * GRACE if status else max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            error.add_note(self._err.read_text(errors="replace")[-5000:])
            raise
        finally:
            for rank in self.ranks:
                rank.send(signal.SIGKILL)
        printed = [path.read_text(errors="replace") for path in (self._out, self._err)]
        shutil.rmtree(self._out.parent)
        return subprocess.CompletedProcess(self.ranks[0].args, status, *printed)


def launch(
    script: Path, *arguments: str, ranks: int = 1, vllm: bool = False, timeout: float = 540
) -> subprocess.CompletedProcess[str]:
    """Run a script on so many CPU ranks; stdout and stderr come back as text."""
    return Ranks(script, *arguments, ranks=ranks, vllm=vllm).finish(timeout)


def completed(
    script: Path, *arguments: str, by: Callable[..., subprocess.CompletedProcess[str]] = launch, **more: Any
) -> subprocess.CompletedProcess[str]:
    """A script that has to end well, however it is started."""
    done = by(script, *arguments, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def launch_module(module: str, *arguments: str, vllm: bool = False) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE`, warm and without a launcher; stdout and stderr come back as text."""
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        for path in (out, err):
            path.touch()
        process = Rank(["-m", module, *arguments], environment(), out, err, vllm=vllm)
        try:
            status = process.wait(300)
        finally:
            process.send(signal.SIGKILL)
        return subprocess.CompletedProcess(process.args, status, *(path.read_text() for path in (out, err)))


def launch_by_deepspeed(script: Path, *arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Launch as a user does: by DeepSpeed's launcher, which takes five seconds more, and with cold imports."""
    return ran(*command(script, *arguments, ranks=ranks), cwd=ROOT, env=environment(), timeout=540)
