"""Several hosts on one machine: network namespaces with addresses of their own.

They share the machine's files and processors. Only root can make them.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from tests.programs import printed, ran
from tests.train.launch import MAIN, ROOT, environment, free_port

NEEDS = ("ip", "taskset")
DEVICE = "exgrpo0"
"""The network device of each host."""


def missing() -> str | None:
    """Why hosts cannot be made here; None: they can."""
    if os.geteuid() != 0:
        return "hosts are network namespaces, which only root can make"
    if absent := [name for name in NEEDS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")]:
        return f"hosts need {', '.join(absent)}"
    return "this system makes no network namespaces" if ran("unshare", "--net", "true").returncode else None


class Hosts:
    """Hosts connected to one switch.

    Args:
        count: number of hosts.
        trainers: number of hosts with a rank of the trainer, the first ones; all if left out.

    Attributes:
        addresses: addresses of the hosts, by number.
    """

    def __init__(self, count: int, trainers: int | None = None) -> None:
        self._trainers = range(count if trainers is None else trainers)
        tag = f"{os.getpid() % 10_000:04}"
        self._names = [f"exgrpo{tag}n{number}" for number in range(count)]
        self._switch = f"exgrpo{tag}s"
        net = f"10.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
        self.addresses = [f"{net}.{number + 1}" for number in range(count)]

    def __enter__(self) -> Self:
        try:
            self._connect()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host, name in enumerate(self._names):
            with suppress(subprocess.CalledProcessError):
                self.kill(host)
            ran("ip", "netns", "delete", name)
        ran("ip", "netns", "delete", self._switch)

    def _connect(self) -> None:
        """A namespace with a bridge, and one for each host, connected to it."""
        printed("ip", "netns", "add", self._switch)
        inside = ("ip", "-n", self._switch, "link")
        printed(*inside, "add", "bridge", "type", "bridge")
        printed(*inside, "set", "bridge", "up")
        for number, (name, address) in enumerate(zip(self._names, self.addresses, strict=True)):
            printed("ip", "netns", "add", name)
            port = f"port{number}"
            printed(*inside, "add", port, "type", "veth", "peer", "name", DEVICE, "netns", name)
            printed(*inside, "set", port, "master", "bridge", "up")
            printed("ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            printed("ip", "-n", name, "link", "set", DEVICE, "up")
            printed("ip", "-n", name, "link", "set", "lo", "up")

    def on(self, host: int) -> list[str]:
        """Return the prefix of a command on a host, which has one processor."""
        processors = sorted(os.sched_getaffinity(0))
        processor = processors[host % len(processors)]
        return ["ip", "netns", "exec", self._names[host], "taskset", "-c", str(processor)]

    def cut(self, host: int) -> None:
        """Take a host's cable out."""
        printed("ip", "-n", self._names[host], "link", "set", DEVICE, "down")

    def restore(self, host: int) -> None:
        """Put the cable in again."""
        printed("ip", "-n", self._names[host], "link", "set", DEVICE, "up")

    def processes(self, host: int) -> list[int]:
        """Return the processes of a host."""
        return [int(process) for process in printed("ip", "netns", "pids", self._names[host]).split()]

    def kill(self, host: int) -> None:
        """Kill all processes of a host at once."""
        for process in self.processes(host):
            with suppress(ProcessLookupError):
                os.kill(process, 9)

    def torchrun(self, *arguments: str) -> list[subprocess.Popen[str]]:
        """The trainer, one rank a host, by a launcher on each of them, as a user or a batch system starts them."""
        common = (
            f"--nnodes={len(self._trainers)}",
            f"--master_addr={self.addresses[0]}",
            f"--master_port={free_port()}",
        )
        return [self._launch(host, *common, f"--node_rank={host}", str(MAIN), *arguments) for host in self._trainers]

    def restarting(self, *arguments: str) -> list[subprocess.Popen[str]]:
        """The same, started again with the hosts that are left; they meet at the first one."""
        meet = ("--rdzv_backend=c10d", f"--rdzv_endpoint={self.addresses[0]}:{free_port()}")
        common = (f"--nnodes=1:{len(self._trainers)}", "--max_restarts=2", *meet)
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

        def start(host: int) -> subprocess.Popen[str]:
            # A host finds its address by its name, and these hosts share the one of the machine.
            place = (f"--local_addr={self.addresses[host]}", f"--rdzv_conf=is_host={host == 0}")
            return self._launch(host, *common, *place, str(MAIN), *arguments, variables=own)

        return [start(host) for host in self._trainers]

    def _launch(
        self, host: int, *words: str, variables: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[str]:
        command = [*self.on(host), str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node=1", *words]
        variables = {**environment(), "GLOO_SOCKET_IFNAME": DEVICE, **variables}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=ROOT, env=variables, text=True, **pipes)
