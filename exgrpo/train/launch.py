"""`exgrpo train [--processes P] [--restarts N] [OPTIONS]`: a run whose processes are started, and started again.

They are the training program's, started by PyTorch's launcher, on one host or on several that are given the same
command. `deepspeed exgrpo/train/main.py` starts them once. One process that is not started again needs no launcher:
this program becomes the training program.
"""

import datetime
import logging
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo.extras import needs

with needs(__name__, "exgrpo[train]"):
    import tyro
    from pydantic import BaseModel, ConfigDict, Field, field_validator
    from rich.console import Console

    from exgrpo.train.checkpoint.resume import AUTO
    from exgrpo.train.command_line import one_line
    from exgrpo.train.dry_run import Size, show
    from exgrpo.train.early import look
    from exgrpo.train.ending import leave
    from exgrpo.train.errors import ConfigError, ExgrpoError, LostProcessError, print_error
    from exgrpo.train.estimate.data_sheets import machine
    from exgrpo.train.process import INTERRUPTED, LAUNCHED, quiet
    from exgrpo.train.program import configure
    from exgrpo.train.recipe import parse_args

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

PROGRAM = "exgrpo train"
MAIN = Path(__file__).with_name("main.py")


class Launch(BaseModel):
    """How the processes of a run are started. The options of training come below."""

    model_config = ConfigDict(frozen=True)

    processes: int = Field(1, ge=1, description="Of each host: one for each GPU.")
    restarts: int = Field(0, ge=0, description="How often they are started again, from the newest checkpoint.")
    hosts: str = Field("1", description="How many: 4; or 2:4, to go on with 2 where 2 of 4 are lost.")
    meet: str | None = Field(None, description="HOST:PORT of one of several hosts, where all of them meet.")
    dry_run: bool = Field(
        False, description="Print the configuration, the plan and an estimate for this machine, and start nothing."
    )
    machine: str | None = Field(
        None, description="With --dry-run: estimate for hosts with such GPUs, as h100x8; None: for this machine."
    )

    @field_validator("hosts")
    @classmethod
    def _count(cls, hosts: str) -> str:
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", hosts) or cls._numbers(hosts)[0] > cls._numbers(hosts)[1]:
            raise ValueError("give a number, as 4, or the fewest and the most, as 2:4")
        return hosts

    @field_validator("meet")
    @classmethod
    def _place(cls, meet: str | None) -> str | None:
        if meet is not None and not re.fullmatch(r"[^:\s]+:\d{1,5}", meet):
            raise ValueError("give HOST:PORT")
        return meet

    @field_validator("machine")
    @classmethod
    def _known(cls, named: str | None) -> str | None:
        if named is not None:
            machine(named)
        return named

    @staticmethod
    def _numbers(hosts: str) -> tuple[int, int]:
        fewest, _, most = hosts.partition(":")
        return int(fewest), int(most or fewest)

    @property
    def fewest_and_most(self) -> tuple[int, int]:
        """Numbers of hosts."""
        return self._numbers(self.hosts)


def main(argv: Sequence[str]) -> int:
    """Start the processes and wait for them; returns the exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    try:
        with one_line(Launch, PROGRAM):
            options, rest = tyro.cli(Launch, args=list(argv), prog=PROGRAM, return_unknown_args=True, add_help=False)
            if {"-h", "--help"} & set(rest):
                with suppress(SystemExit):
                    tyro.cli(Launch, args=["--help"], prog=PROGRAM)
                parse_args(rest)  # prints its help, and ends
        if options == Launch():
            os.execv(sys.executable, [sys.executable, str(MAIN), *rest])
        if options.machine and not options.dry_run:
            raise ConfigError("machine: it is what a dry run estimates for: give --dry-run with it")
        if options.dry_run:
            return _show(options, rest)
        return _start(options, prepared(options, rest))
    except ExgrpoError as error:
        return print_error(error)
    except (KeyboardInterrupt, SignalException):
        return INTERRUPTED


def prepared(options: Launch, rest: list[str]) -> list[str]:
    """The arguments of each process: a run that may start again needs a name and goes on by itself.

    Raises:
        ConfigError: the training program would refuse them, or they do not say which run several hosts go on with.
    """
    if options.fewest_and_most[1] > 1 and not options.meet:
        raise ConfigError("hosts: several hosts need a place to meet: give --meet HOST:PORT, the same on each of them")
    config, folder = configure(rest)
    with ExitStack() as resources:  # what each start would say again
        look(config, resources, resumed=folder is not None)
    if not options.restarts or (config.resume and config.resume != AUTO):
        return rest
    if config.output.name is None:
        if options.fewest_and_most[1] > 1:
            raise ConfigError("restarts: give the run an --output.name, by which all hosts know it")
        rest = [*rest, f"--output.name={datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"]
    return rest if config.resume else [*rest, f"--resume={AUTO}"]


def _show(options: Launch, rest: list[str]) -> int:
    quiet()
    gpu, count = machine(options.machine) if options.machine else (None, None)
    if count not in (None, options.processes) and options.processes != 1:
        raise ConfigError(f"processes ({options.processes}): {options.machine} has {count}, one process for each GPU")
    config, folder = configure(rest)
    console = Console()
    with ExitStack() as resources:
        early = look(config, resources, resumed=folder is not None)
        hosts = options.fewest_and_most[1]
        size = Size(count or options.processes, hosts, gpu)
        show(config, early, folder, size, lambda what: console.print(what, highlight=False, soft_wrap=True))
    return 0


def _start(options: Launch, arguments: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    own = options.model_dump(exclude_defaults=True)
    os.environ[LAUNCHED] = shlex.join(f"--{name}={value}" for name, value in own.items())
    try:
        elastic_launch(launch_config(options), sys.executable)("-u", str(MAIN), *arguments)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode > 0:  # it has said why
            return failure.exitcode
        raise LostProcessError(
            f"the process of rank {rank} has ended by {signal.Signals(-failure.exitcode).name}, and "
            f"{options.restarts} restarts are used up: go on with --resume auto"
        ) from None
    return 0


def launch_config(options: Launch) -> "LaunchConfig":
    """What PyTorch's launcher is told.

    Raises:
        ConfigError: the host where all meet is not known or not reached.
    """
    from torch.distributed.launcher.api import LaunchConfig

    # The store of one start has the addresses of the processes that are gone: each start needs its own.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    fewest, most = options.fewest_and_most
    place = options.meet or "127.0.0.1:0"
    address, is_host = _addresses(place)
    return LaunchConfig(
        min_nodes=fewest,
        max_nodes=most,
        nproc_per_node=options.processes,
        max_restarts=options.restarts,
        run_id="exgrpo",
        rdzv_backend="c10d",
        rdzv_endpoint=place,
        rdzv_configs={"is_host": is_host},
        local_addr=address,
    )


def _addresses(place: str) -> tuple[str, bool]:
    """This host's address on the way to a HOST:PORT, and whether it is that host."""
    host, _, port = place.rpartition(":")
    try:
        there = socket.getaddrinfo(host, int(port) or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(there[0], socket.SOCK_DGRAM) as probe:
            probe.connect(there[4])  # sends nothing
            address = probe.getsockname()[0]
    except (OSError, OverflowError) as error:
        raise ConfigError(f"meet: {place} is not known or not reached from this host: {error}") from None
    return address, address == there[4][0]


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
