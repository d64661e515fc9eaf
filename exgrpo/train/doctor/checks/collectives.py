"""Do the processes of a run find each other, and do their collectives give what they should?

The module is also the program of each of these processes: its argument is the file to which the first one writes.
"""

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo.train.doctor.check import Check, CheckFailedError, Given
from exgrpo.train.doctor.machine import processes
from exgrpo.train.doctor.ranks import launch

if TYPE_CHECKING:
    from exgrpo.train.distributed import World

MODULE = "exgrpo.train.doctor.checks.collectives"
REMEDY = (
    "NCCL_DEBUG=INFO has NCCL say more; NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1 and NCCL_SHM_DISABLE=1 leave out one way "
    "each, and NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names the network interface"
)
TURNS = 5
ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""By kind of device: fp32 elements that are gathered when that is timed."""


def check(given: Given) -> str:
    """Run the collectives of ZeRO-3 on all GPUs, or two processes."""
    found = given.folder / "measured"
    launch(processes(), given.folder, ["--module", MODULE, str(found)], REMEDY)
    return found.read_text(encoding="utf-8")


def measure(world: "World") -> str:
    """What the collectives of one process group give, and how fast.

    Raises:
        CheckFailedError: on a rank that got something wrong.
    """
    import torch
    import torch.distributed as dist

    size, rank, device = world.size, world.rank, world.device
    own = torch.full((size,), float(rank + 1), device=device)
    every = torch.arange(1, size + 1, dtype=own.dtype, device=device)
    summed, scattered = own.clone(), own.new_empty(1)
    gathered, first = own.new_empty(size), torch.full((1,), float(rank), device=device)
    dist.all_reduce(summed)
    dist.all_gather_into_tensor(gathered, own[:1].clone())
    dist.reduce_scatter_tensor(scattered, own)
    dist.broadcast(first, 0)
    wrong = [
        name
        for name, right in (
            ("all_reduce", bool((summed == every.sum()).all())),
            ("all_gather", torch.equal(gathered, every)),
            ("reduce_scatter", bool((scattered == every.sum()).all())),
            ("broadcast", first.item() == 0),
            ("all_gather_object", world.gather(rank) == list(range(size))),
        )
        if not right
    ]
    if wrong:
        raise CheckFailedError(f"rank {rank} of {size} got wrong numbers from {', '.join(wrong)}")
    rate = f"; {gather_rate(world) / 1e9:.2f} GB/s in all_gather" if size > 1 else ""
    return f"{dist.get_backend()}, {size} x {device.type}: right{rate}"


def gather_rate(world: "World") -> float:
    """Bytes per second that each rank receives in the fastest of some gathers."""
    import torch
    import torch.distributed as dist

    part = torch.ones(ELEMENTS[world.device.type] // world.size, device=world.device)
    whole = part.new_empty(len(part) * world.size)
    seconds = []
    for _ in range(TURNS):
        world.gather(None)
        start = time.perf_counter()
        dist.all_gather_into_tensor(whole, part)
        if world.device.type != "cpu":
            torch.accelerator.synchronize(world.device)
        seconds.append(time.perf_counter() - start)
    return 4 * len(part) * (world.size - 1) / min(seconds)


def main(found: Path) -> int:
    """The program of one process; returns its exit status."""
    from exgrpo.train.process import run_program

    def work(_: ExitStack) -> None:
        from exgrpo.train.distributed import start

        world = start(timeout_minutes=5)
        text = measure(world)
        if world.is_main:
            found.write_text(text, encoding="utf-8")

    return run_program(work, "stopped")


CHECKS = (Check("collectives", check, 1, REMEDY),)

if __name__ == "__main__":
    from exgrpo.train.ending import leave

    leave(main(Path(sys.argv[1])))
