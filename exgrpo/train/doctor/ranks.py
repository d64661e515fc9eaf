"""A program on several processes of this machine, by DeepSpeed's launcher as a user starts it."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from exgrpo.train.doctor.check import LOG, CheckFailedError


def launch(ranks: int, folder: Path, program: Sequence[str], remedy: str) -> None:
    """Run a program; what it prints goes to this process's standard error.

    Args:
        ranks: how many processes of it; one is started without the launcher.
        folder: of the check.
        program: the file of a Python program, or --module and a module, and its arguments.
        remedy: what to do where it fails.

    Raises:
        CheckFailedError: it does.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ["-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, "--master_port", str(port)]
    alone = ["-m" if word == "--module" else word for word in program]
    words = alone if ranks == 1 else [*launcher, "--num_accelerators", str(ranks), "--no_local_rank", *program]
    status = subprocess.run([sys.executable, *words], stdout=sys.stderr, check=False).returncode
    if status:
        printed = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        told = next((f": {line}" for line in reversed(printed) if line.startswith("error")), "")
        raise CheckFailedError(f"{ranks} of its processes ended with status {status}{told}. {remedy}")
