"""Process group of a run: start-up, device, exchange of Python objects, and errors raised on all ranks together."""

import dataclasses
import datetime
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from exgrpo.train.common.errors import ConfigError, ExgrpoError, shown
from exgrpo.train.common.threads import Threads, choose

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Process group of the run.

    Attributes:
        rank: this process, 0..size-1.
        size: number of processes.
        device: device of this process.
        control: gloo group for Python objects, in addition to NCCL on GPUs; None if this is the only process.
        threads: threads of each process on this machine; None: torch's default (GPUs).
    """

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup | None
    threads: Threads | None = None

    @property
    def is_main(self) -> bool:
        """True for the process that writes and prints."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in the order of ranks, on every rank."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values  # type: ignore[return-value]

    @property
    def kept(self) -> dict[str, int] | None:
        """Thread settings stored in checkpoints, so that a resumed run uses as many."""
        return {"ranks": self.size, "threads": self.threads.count} if self.threads else None

    def split(self, items: Sequence[T], ranks: int = 1) -> list[tuple[int, T]]:
        """Return this rank's share of `items` with their positions; `ranks` neighbouring ranks get the same one."""
        return [(i, items[i]) for i in range(self.rank // ranks, len(items), self.size // ranks)]

    def join(self, share: Sequence[tuple[int, T]]) -> list[T]:
        """Return all items in order on every rank; the inverse of `split` over all ranks."""
        pairs = [pair for of_rank in self.gather(list(share)) for pair in of_rank]
        return [item for _, item in sorted(pairs, key=lambda pair: pair[0])]


DRIVER = Path("/proc/driver/nvidia/version")
"""File that exists only if an NVIDIA driver is loaded."""
ALONE = World(0, 1, torch.device("cpu"), control=None)
"""World of a program without ranks."""


def fail_together(world: World, problem: ExgrpoError | None) -> None:
    """Raise the first problem in the order of ranks on all ranks, if any rank has one; collective."""
    for found in world.gather(problem):
        if found is not None:
            raise found


def agree(world: World, action: Callable[[], T]) -> T:
    """Return the result of an action on this rank; raise its ExgrpoError on all ranks if any has one; collective."""
    problem: ExgrpoError | None = None
    try:
        result = action()
    except ExgrpoError as error:
        problem = error
    fail_together(world, problem)
    return result


def on_main(world: World, action: Callable[[], T]) -> T | None:
    """Return the result of an action on rank 0, None elsewhere; collective, raises as `agree`."""
    return agree(world, action if world.is_main else lambda: None)


def start(timeout_minutes: float, threads: int | None = None, kept: Mapping[str, int] | None = None) -> World:
    """Join the process group that the launcher describes; without a launcher, a world of one.

    The backend follows the hardware: NCCL on GPUs, gloo on CPUs.

    Args:
        timeout_minutes: time limit of waiting for other ranks.
        threads: threads of each process; None: see `exgrpo.train.common.threads.choose`.
        kept: `World.kept` of the resumed run; None: a new run.

    Raises:
        ConfigError: the environment does not describe a group that can be joined.
    """
    _without_launcher()
    _check_restarts()
    from deepspeed.accelerator import get_accelerator

    local_rank = int(os.environ["LOCAL_RANK"])
    local_size = int(os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1")))  # DeepSpeed's, PyTorch's
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    if on_cpu:
        from deepspeed.ops import __compatible_ops__

        # DeepSpeed would compile for 100 s an extension that only its inference all-reduce uses.
        __compatible_ops__["deepspeed_shm_comm"] = False
    else:
        check_devices(max(local_size, local_rank + 1), accelerator.device_count())
        accelerator.set_device(local_rank)
    import deepspeed

    timeout = datetime.timedelta(minutes=timeout_minutes)
    try:
        deepspeed.init_distributed(timeout=timeout, verbose=False)
    except (ValueError, OSError, dist.DistError) as error:
        raise ConfigError(
            f"the processes of the run cannot join their group: {shown(error, 500)}; where the port is in use, as by "
            "another run, give the launcher another --master_port"
        ) from error
    world = World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        device=torch.device("cpu") if on_cpu else torch.device(accelerator.device_name(local_rank)),
        control=dist.new_group(backend="gloo", timeout=timeout),
    )
    world = dataclasses.replace(world, threads=_threads(world, local_size, threads, kept))
    if world.threads:
        torch.set_num_threads(world.threads.count)
    return world


def _threads(world: World, local_size: int, asked: int | None, kept: Mapping[str, int] | None) -> Threads | None:
    """Return the threads of each process on this machine, measured by its first process while the others wait."""
    if world.device.type != "cpu":
        return Threads(asked, "distributed.threads") if asked else None
    first, found = world.rank - int(os.environ["LOCAL_RANK"]), None
    processors = world.gather(os.sched_getaffinity(0))[first : first + local_size]
    if world.rank == first:
        same = kept["threads"] if kept and kept["ranks"] == world.size else None
        found = choose(asked, same, processors)
    return world.gather(found)[first]


def missing_gpu(world: World) -> str | None:
    """Return a warning if the CPU computes although a GPU is probably expected, else None.

    The launcher starts as many processes as requested, with or without GPUs.
    """
    driver = DRIVER.exists()
    if world.device.type != "cpu" or os.environ.get("DS_ACCELERATOR") == "cpu" or not (driver or world.size > 1):
        return None
    build = "this build of torch is for CPUs" if torch.version.cuda is None else "nvidia-smi may show why"
    machine = "this machine has an NVIDIA driver, but " if driver else ""
    return f"{machine}torch {torch.__version__} sees no GPU ({build}): the CPU computes"


def _without_launcher() -> None:
    if "RANK" in os.environ:
        if "LOCAL_RANK" not in os.environ:
            raise ConfigError("RANK is set and LOCAL_RANK is not: set what a launcher sets, or unset RANK to be alone")
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for key, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": port}.items():
        os.environ[key] = str(value)
    os.environ["MASTER_ADDR"] = "127.0.0.1"


def _check_restarts() -> None:
    """Check that a launcher which restarts processes gives each start a store of its own.

    PyTorch's launcher shares one among all starts by default, which keeps the addresses of ended processes.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("TORCHELASTIC_MAX_RESTARTS") != "0":
        raise ConfigError(
            "torchrun --max-restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend c10d or "
            "--standalone, else processes that are started again do not find each other; or start the run by "
            "exgrpo train --restarts N"
        )


def check_devices(processes: int, devices: int) -> None:
    """Check that every process of a host has a GPU; `devices` is the number visible to each. Raises ConfigError."""
    if processes > devices:
        raise ConfigError(
            f"{processes} processes of the run are to compute on this host, where torch sees {devices} GPUs: start one "
            "process for each GPU, and let every process see all of them (CUDA_VISIBLE_DEVICES)"
        )
