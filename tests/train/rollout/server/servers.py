"""Real rollout servers on this machine, started as a user does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import requests

from exgrpo.train.rollout.server.guard import server_token
from tests.train.launch import ROOT, environment, free_port
from tests.train.warm import Rank

LONGEST = 64
"""Prompt + response tokens that the servers take."""


WARM = ROOT / "tests" / "train" / "rollout" / "server" / "warm_server.py"


def bearer() -> dict[str, str]:
    """The header with the token of servers and trainer."""
    return {"Authorization": f"Bearer {server_token()}"}


class Server:
    """A server of a model; `log` holds what it printed.

    Where it is cold it starts as a user starts it, and each of its three processes imports vLLM, in 35 seconds.

    Args:
        model: that it serves.
        log: what it prints.
        options: of `exgrpo.tools.serve`.
        cold: see above.
        on: what comes before a command on its host; a server on another host is a cold one.
        address: of its host.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *options: str,
        cold: bool = False,
        on: Sequence[str] = (),
        address: str = "127.0.0.1",
    ) -> None:
        self.port = free_port()
        self.url = f"http://{address}:{self.port}"
        self.log = log
        self._arguments = [str(model), f"--host={address}", f"--port={self.port}", *options]
        self._cold = cold or bool(on)
        self._on = on
        self._process: subprocess.Popen[bytes] | Rank | None = None

    def start(self) -> "Server":
        """Start it, if it does not run, without waiting for it."""
        if self._process is None or self._process.poll() is not None:
            self.log.write_bytes(b"")
            self._process = self._started()
        return self

    def _started(self) -> "subprocess.Popen[bytes] | Rank":
        if not self._cold:
            return Rank([str(WARM), *self._arguments], environment(), self.log, self.log, vllm=True)
        command = [*self._on, sys.executable, "-m", "exgrpo.tools.serve", *self._arguments]
        with self.log.open("wb") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ready(self) -> str:
        """Its address, once it answers."""
        self.start()
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if self._answers():
                return self.url
            time.sleep(0.2)
            if self._process.poll() is not None:
                break
        raise RuntimeError(f"the server did not start:\n{self.log.read_text(errors='replace')[-5000:]}")

    def _answers(self) -> bool:
        if self._on:  # this process does not reach it
            return "Application startup complete" in self.log.read_text(errors="replace")
        try:
            return requests.get(f"{self.url}/health", headers=bearer(), timeout=5).ok
        except requests.RequestException:
            return False

    def kill(self) -> None:
        """End it and its workers at once, as a machine that loses its power."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=60)

    def kill_alone(self) -> None:
        """End it, not its workers."""
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=60)

    def workers_end(self, within: float = 20.0) -> bool:
        """True if all processes that it started end within this many seconds."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.1)
        return False

    def asked(self) -> float:
        """Return the prompt tokens of all requests since it started."""
        return self._counted("prompt_tokens_total")

    def generated(self) -> float:
        """Tokens that it generated since it started."""
        return self._counted("generation_tokens_total")

    def _counted(self, name: str) -> float:
        lines = requests.get(f"{self.url}/metrics", headers=bearer(), timeout=60).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))
