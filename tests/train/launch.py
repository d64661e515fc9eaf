"""Start scripts as a user does: through the deepspeed launcher."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAIN = ROOT / "exgrpo" / "train" / "main.py"


def launch(
    script: Path, *arguments: str, ranks: int = 1, cwd: Path = ROOT, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a script on so many CPU ranks; stdout and stderr come back as text."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("deepspeed")),
        f"--num_accelerators={ranks}",
        f"--master_port={port}",
        str(script),
        *arguments,
    ]
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "COLUMNS": "200",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
