"""Several hosts on one machine: network namespaces with addresses of their own, an ssh daemon in each.

They share the machine's files and processors. Only root can make them.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from exgrpo.train.rollout.server.shared_token import TOKEN
from tests.train.launch import MAIN, ROOT, environment, free_port

NEEDS = ("ip", "tc", "sshd", "ssh-keygen", "pdsh", "taskset")
DEVICE = "exgrpo0"
"""The network device of each host."""
BURST_SECONDS = 1.5e-3
"""What passes a limited cable in this time may pass at once: the kernel does not look at single frames."""
QUEUE = 2**23
"""Bytes that may wait before a limited cable: more than TCP sends before it hears something, so that none is lost."""


def missing() -> str | None:
    """Why hosts cannot be made here; None: they can."""
    if os.geteuid() != 0:
        return "hosts are network namespaces, which only root can make"
    if absent := [name for name in NEEDS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")]:
        return f"hosts need {', '.join(absent)}"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return None if probe.returncode == 0 else "this system makes no network namespaces"


def run(*command: str) -> str:
    """A command that must succeed; returns what it printed."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Hosts:
    """Hosts behind one switch.

    Args:
        folder: for keys, logs and what the launcher reads.
        count: how many.
        trainers: how many of them have a rank of the trainer, the first ones; all if left out.

    Attributes:
        addresses: of the hosts, by number.
    """

    def __init__(self, folder: Path, count: int, trainers: int | None = None) -> None:
        self.folder = folder
        self._trainers = range(count if trainers is None else trainers)
        tag = f"{os.getpid() % 10_000:04}"
        self._names = [f"exgrpo{tag}n{number}" for number in range(count)]
        self._switch = f"exgrpo{tag}s"
        net = f"10.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
        self.addresses = [f"{net}.{number + 1}" for number in range(count)]
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._cables: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self._connect()
            self._keys()
            self._daemons.extend(map(self._daemon, range(len(self._names))))
            for address in self.addresses:
                self._reach(address)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in list(self._cables):
            self._shorten(host)
        for name in self._names:
            with suppress(subprocess.CalledProcessError):
                for process in run("ip", "netns", "pids", name).split():
                    with suppress(ProcessLookupError):
                        os.kill(int(process), 9)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "delete", self._switch], capture_output=True, check=False)
        for daemon in self._daemons:
            daemon.wait(10)

    def _connect(self) -> None:
        """A namespace with a bridge, and one for each host, connected to it."""
        run("ip", "netns", "add", self._switch)
        inside = ("ip", "-n", self._switch, "link")
        run(*inside, "add", "bridge", "type", "bridge")
        run(*inside, "set", "bridge", "up")
        for number, (name, address) in enumerate(zip(self._names, self.addresses, strict=True)):
            run("ip", "netns", "add", name)
            port = f"port{number}"
            run(*inside, "add", port, "type", "veth", "peer", "name", DEVICE, "netns", name)
            run(*inside, "set", port, "master", "bridge", "up")
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            run("ip", "-n", name, "link", "set", DEVICE, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")

    def _keys(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        for name in ("host", "user"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        (self.folder / "authorized").write_text((self.folder / "user.pub").read_text())
        Path("/run/sshd").mkdir(exist_ok=True)  # the daemon insists on it

    def _daemon(self, host: int) -> subprocess.Popen[bytes]:
        options = {
            "ListenAddress": self.addresses[host],
            "HostKey": self.folder / "host",
            "AuthorizedKeysFile": self.folder / "authorized",
            "StrictModes": "no",
            "PidFile": "none",
            "MaxStartups": "100",
            "AcceptEnv": TOKEN,
        }
        words = [f"-o{key}={value}" for key, value in options.items()]
        sshd = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/bin")
        command = [*self.on(host), str(sshd), "-D", "-e", "-f/dev/null", *words]
        with (self.folder / f"{self._names[host]}.log").open("wb") as log:
            return subprocess.Popen(command, stderr=log)

    @property
    def _ssh(self) -> list[str]:
        # What the launcher passes on stands on command lines, which is no place for a secret.
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", f"SendEnv={TOKEN}")
        return [f"-i{self.folder / 'user'}", *(f"-o{option}" for option in options)]

    def _reach(self, address: str) -> None:
        deadline = time.monotonic() + 30
        while True:
            try:
                run(*self.on(0), "ssh", *self._ssh, address, "true")
            except subprocess.CalledProcessError as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{address} is not reached: {error.stderr}") from error
                time.sleep(0.1)
            else:
                return

    def on(self, host: int) -> list[str]:
        """What comes before a command on a host, which has one processor."""
        processors = sorted(os.sched_getaffinity(0))
        processor = processors[host % len(processors)]
        return ["ip", "netns", "exec", self._names[host], "taskset", "-c", str(processor)]

    def cut(self, host: int) -> None:
        """Take a host's cable out."""
        run("ip", "-n", self._names[host], "link", "set", DEVICE, "down")

    def restore(self, host: int) -> None:
        """Put the cable in again."""
        run("ip", "-n", self._names[host], "link", "set", DEVICE, "up")

    def limit(self, host: int, *, seconds: float = 0.0, megabits: float | None = None) -> None:
        """Let a host have another cable, in the place of the one that it had.

        Args:
            host: its number.
            seconds: for which a frame is under way, in each direction.
            megabits: that pass in a second, in each direction; None: as many as the machine moves.
        """
        port = f"port{host}"
        self._shorten(host)
        if seconds:
            near, far = f"near{host}", f"far{host}"
            inside = ("ip", "-n", self._switch, "link")
            run(*inside, "add", near, "type", "veth", "peer", "name", far)
            run(*inside, "set", port, "nomaster")
            run(*inside, "set", near, "up")
            run(*inside, "set", far, "master", "bridge", "up")
            words = [sys.executable, "-m", "tests.train.cable", port, near, str(seconds)]
            command = ["ip", "netns", "exec", self._switch, *words]
            self._cables[host] = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
            self._cables[host].stdout.readline()  # it is connected
        for namespace, device in ((self._names[host], DEVICE), (self._switch, port)):
            subprocess.run(
                ["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], capture_output=True, check=False
            )
            if megabits is not None:
                rate = (
                    "rate",
                    f"{megabits * 1e6:.0f}bit",
                    "burst",
                    f"{megabits * 1e6 / 8 * BURST_SECONDS:.0f}",
                    "limit",
                    str(QUEUE),
                )
                run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *rate)

    def _shorten(self, host: int) -> None:
        """Connect a host with the switch, without what delays its frames."""
        cable = self._cables.pop(host, None)
        if cable is None:
            return
        cable.kill()
        cable.wait(10)
        run("ip", "-n", self._switch, "link", "delete", f"near{host}")
        run("ip", "-n", self._switch, "link", "set", f"port{host}", "master", "bridge")

    def counted(self, host: int) -> tuple[int, int]:
        """Bytes that a host has received and sent so far, with the headers of frames."""
        text = run("ip", "-n", self._names[host], "-j", "-s", "link", "show", DEVICE)
        of_device = json.loads(text)[0]["stats64"]
        return of_device["rx"]["bytes"], of_device["tx"]["bytes"]

    def processes(self, host: int) -> list[int]:
        """What runs on a host, besides its ssh daemon."""
        daemons = {daemon.pid for daemon in self._daemons}
        found = map(int, run("ip", "netns", "pids", self._names[host]).split())
        return [process for process in found if process not in daemons]

    def kill(self, host: int) -> None:
        """Kill all processes of a host at once."""
        for process in self.processes(host):
            with suppress(ProcessLookupError):
                os.kill(process, 9)

    def deepspeed(self, *arguments: str) -> subprocess.Popen[str]:
        """The trainer, one rank a host, by DeepSpeed's launcher on the first one, which reaches the others by ssh."""
        variables = self.folder / "variables"  # pdsh passes no other ones on
        variables.write_text("".join(f"{name}={value}\n" for name, value in self._variables.items()))
        told = {"PDSH_SSH_ARGS_APPEND": " ".join(self._ssh), "DS_ENV_FILE": str(variables)}
        return self._launch(0, free_port(), told, "--no_ssh_check", str(MAIN), *arguments)

    def each(self, *arguments: str) -> list[subprocess.Popen[str]]:
        """The same by a launcher on each host, as a batch system starts them."""
        port = free_port()
        return [
            self._launch(host, port, {}, "--no_ssh", f"--node_rank={host}", str(MAIN), *arguments)
            for host in self._trainers
        ]

    def restarting(self, *arguments: str) -> list[subprocess.Popen[str]]:
        """By the launcher that starts a run again, with the hosts that are left; they meet at the first one."""
        meet = f"--meet={self.addresses[0]}:{free_port()}"
        words = ("-m", "exgrpo.train.launch", f"--hosts=1:{len(self.addresses)}", meet, "--restarts=2", *arguments)
        return [self._start(host, {}, sys.executable, *words) for host in range(len(self.addresses))]

    @property
    def _variables(self) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": DEVICE, **{name: environment()[name] for name in ("DS_ACCELERATOR", "COLUMNS")}}

    def _launch(self, host: int, port: int, told: dict[str, str], *words: str) -> subprocess.Popen[str]:
        file = self.folder / "hosts.txt"
        file.write_text("".join(f"{self.addresses[host]} slots=1\n" for host in self._trainers))
        launcher = str(Path(sys.executable).with_name("deepspeed"))
        options = (f"--hostfile={file}", f"--master_addr={self.addresses[0]}", f"--master_port={port}")
        return self._start(host, told, launcher, *options, *words)

    def _start(self, host: int, told: dict[str, str], *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.on(host), *command],
            cwd=ROOT,
            env={**environment(), **self._variables, **told},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
