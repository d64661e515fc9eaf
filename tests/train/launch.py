"""Start scripts as a user does: through the deepspeed launcher."""

import os
import random
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

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
    """Run a script on so many CPU ranks; stdout and stderr come back as text."""
    return subprocess.run(
        command(script, *arguments, ranks=ranks),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
