"""Start scripts on several ranks, by the deepspeed launcher as a user does, or without it."""

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile

ROOT = Path(__file__).parents[2]
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


def launch(script: Path, *arguments: str, ranks: int = 1, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a script on so many CPU ranks, as the launcher would; stdout and stderr come back as text.

    The launcher imports DeepSpeed twice and looks after its processes once a second: five seconds that most tests do
    without. `launch_by_deepspeed` is the real one.
    """
    world = {"WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err, ExitStack() as running:
        processes = []
        for rank in range(ranks):
            of_rank = {name: str(value) for name, value in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()}
            words = [sys.executable, "-u", str(script), f"--local_rank={rank}", *arguments]
            process = subprocess.Popen(words, cwd=ROOT, env={**environment(), **of_rank}, stdout=out, stderr=err)
            running.callback(process.kill)
            processes.append(process)
        status = first_failure(processes, timeout)
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(processes[0].args, status, out.read(), err.read())


def first_failure(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> int:
    """The first exit status other than 0, at which the other processes are asked to end; 0 where all end with that."""
    deadline = time.monotonic() + timeout
    left = list(processes)
    while left:
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(left[0].args, timeout)
        for process in [process for process in left if process.poll() is not None]:
            left.remove(process)
            if process.returncode:
                for other in left:
                    other.terminate()
                for other in left:
                    other.wait(30)
                return process.returncode
        time.sleep(0.05)
    return 0


def launch_by_deepspeed(script: Path, *arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """As `launch`, by the launcher that a user starts."""
    return subprocess.run(
        command(script, *arguments, ranks=ranks),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
