"""`exgrpo train [--processes P] [--restarts N] [OPTIONS]`: start a run's processes, and restart them after a failure.

PyTorch's launcher starts the training program on one host; `deepspeed exgrpo/train/main.py` and `torchrun
exgrpo/train/main.py` start it on several. A single process without restarts needs no launcher: this program becomes the
training program.
"""

import datetime
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from exgrpo.extras import needs

with needs(__name__, "exgrpo[train]"):
    import tyro
    from pydantic import BaseModel, ConfigDict, Field, field_validator
    from rich.console import Console

    from exgrpo.tools.dry_run import lines, machine
    from exgrpo.tools.first import main as first
    from exgrpo.train.checkpoint.resume import AUTO
    from exgrpo.train.common.errors import ConfigError, ExgrpoError, LostProcessError, print_error
    from exgrpo.train.common.process import INTERRUPTED, LAUNCHED, LAUNCHER, leave, quiet
    from exgrpo.train.config.command_line import one_line
    from exgrpo.train.config.recipe import parse_args
    from exgrpo.train.main import configure
    from exgrpo.train.run.startup_checks import check_startup

PROGRAM = "exgrpo train"
MAIN = Path(__file__).parents[1] / "train" / "main.py"


class LaunchOptions(BaseModel):
    """Start the processes of a run. The options of training come below."""

    model_config = ConfigDict(frozen=True)

    first: bool = Field(
        False, description="Do the first result: two small runs, with replay and without, and one page about both."
    )
    processes: int = Field(1, ge=1, description="Number of processes: one per GPU.")
    restarts: int = Field(0, ge=0, description="Number of restarts after a failure, from the newest checkpoint.")
    dry_run: bool = Field(
        False, description="Print the configuration, the plan, memory and FLOPs of a step, and start nothing."
    )
    machine: str | None = Field(
        None, description="With --dry-run: the GPUs to plan for, as h100x8; None: this machine."
    )

    @field_validator("machine")
    @classmethod
    def _known(cls, named: str | None) -> str | None:
        if named is not None:
            machine(named)
        return named


def main(argv: Sequence[str]) -> int:
    """Start the processes and wait for them; return the exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    try:
        with one_line(LaunchOptions, PROGRAM):
            options, rest = tyro.cli(
                LaunchOptions, args=list(argv), prog=PROGRAM, return_unknown_args=True, add_help=False
            )
            if {"-h", "--help"} & set(rest):
                with suppress(SystemExit):
                    tyro.cli(LaunchOptions, args=["--help"], prog=PROGRAM)
                parse_args(rest)  # prints its help and exits
        if options == LaunchOptions():
            os.execv(sys.executable, [sys.executable, str(MAIN), *rest])
        if options.first:
            if options != LaunchOptions(first=True):
                raise ConfigError("first: it starts two runs of one process each: leave the other options of it out")
            return first(rest)
        if options.machine and not options.dry_run:
            raise ConfigError("machine: it is what a dry run plans for: give --dry-run with it")
        if options.dry_run:
            return _show(options, rest)
        return _start(options, prepared(options, rest))
    except ExgrpoError as error:
        return print_error(error)
    except (KeyboardInterrupt, SignalException):
        return INTERRUPTED


def prepared(options: LaunchOptions, rest: list[str]) -> list[str]:
    """Return the arguments of each process; a run that may restart gets a name and `--resume auto`.

    Raise ConfigError if the training program would refuse the options.
    """
    config, folder = configure(rest)
    with ExitStack() as resources:  # report errors once, not at each restart
        check_startup(config, resources, resumed=folder is not None)
    if not options.restarts or (config.resume and config.resume != AUTO):
        return rest
    if config.output.name is None:
        name = folder.name if folder else f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
        rest = [*rest, f"--output.name={name}"]
    return rest if config.resume else [*rest, f"--resume={AUTO}"]


def _show(options: LaunchOptions, rest: list[str]) -> int:
    quiet()
    gpu, count = machine(options.machine) if options.machine else (None, None)
    if count not in (None, options.processes) and options.processes != 1:
        raise ConfigError(f"processes ({options.processes}): {options.machine} has {count}, one process for each GPU")
    config, folder = configure(rest)
    console = Console()
    with ExitStack() as resources:
        startup = check_startup(config, resources, resumed=folder is not None)
        processes = count or options.processes
        for line in lines(config, startup, folder, processes, gpu):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


def _start(options: LaunchOptions, arguments: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    own = options.model_dump(exclude_defaults=True)
    os.environ[LAUNCHED] = shlex.join(f"--{name}={value}" for name, value in own.items())
    os.environ[LAUNCHER] = str(os.getpid())
    # A store shared by restarts would keep the addresses of ended processes.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=options.processes,
        max_restarts=options.restarts,
        run_id="exgrpo",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"is_host": True},
        local_addr="127.0.0.1",
    )
    try:
        elastic_launch(config, sys.executable)("-u", str(MAIN), *arguments)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode > 0:  # the process has printed its error
            return failure.exitcode
        raise LostProcessError(
            f"the process of rank {rank} has ended by {signal.Signals(-failure.exitcode).name}, and "
            f"{options.restarts} restarts are used up: go on with --resume auto"
        ) from None
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
