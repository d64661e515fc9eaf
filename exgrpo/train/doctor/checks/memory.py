"""Is as much memory and disk space free as the recipe is estimated to take?"""

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from exgrpo.train.config import Config
from exgrpo.train.doctor.check import Check, CheckFailedError, Given, Skipped
from exgrpo.train.doctor.checks.disk import place_of
from exgrpo.train.doctor.machine import device, free_memory, processes
from exgrpo.train.early import check_places
from exgrpo.train.errors import ModelError
from exgrpo.train.estimate.parts import GIB, MOMENTS, Hardware, peak
from exgrpo.train.recipe import merged, validate

if TYPE_CHECKING:
    from exgrpo.train.estimate.shape import ModelShape


class Room(NamedTuple):
    """What a run takes of something, and what is there; bytes."""

    name: str
    needed: float
    free: float
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.needed / GIB:.1f} of {self.free / GIB:.1f} GiB"


def check(given: Given) -> str:
    """Compare the estimate of `python -m exgrpo.train.estimate` with what is free now."""
    recipe = given.recipe
    if not recipe.policy.path:
        raise Skipped("the recipe names no model: give one that has policy.path by --recipe")
    check_places(recipe.policy.path, ())
    from exgrpo.train.estimate.shape import read_shape

    try:
        shape = read_shape(recipe.policy.path, overrides=recipe.policy.overrides)
    except ModelError as error:
        raise Skipped(f"there is no estimate: {error}") from None
    rooms = list(on_cpu(recipe, shape) if device().type == "cpu" else on_gpus(recipe, shape))
    short = [f"{room} free. {room.remedy}" for room in rooms if room.needed > room.free]
    if short:
        raise CheckFailedError(" ".join(short))
    return f"the recipe takes {', '.join(map(str, rooms))} free"


def on_gpus(recipe: Config, shape: "ModelShape") -> Iterator[Room]:
    """What the recipe takes of each GPU, of CPU memory and disk space."""
    import torch

    from exgrpo.train.estimate.advice import advise
    from exgrpo.train.estimate.options import Options

    free = min(torch.cuda.mem_get_info(i)[0] for i in range(processes()))
    usable = free - Options().reserve_gib * GIB
    needed = _peak(recipe, shape, processes())
    hardware = Hardware(processes(), usable, flops=1, bandwidth=1)
    yield Room("GPU", needed, usable, advise(recipe, shape, hardware) if needed > usable else "")
    yield from _beside(recipe, shape, processes())


def on_cpu(recipe: Config, shape: "ModelShape") -> Iterator[Room]:
    """What one process without a GPU takes: all memory is of one kind."""
    if recipe.rollout.engine == "auto":
        recipe = validate(merged(recipe.model_dump(), {"rollout.engine": "transformers"}), "the recipe")
    memory, disk = _beside(recipe, shape, 1)
    yield memory._replace(needed=memory.needed + _peak(recipe, shape, 1))
    yield disk


def _peak(recipe: Config, shape: "ModelShape", ranks: int) -> float:
    from exgrpo.train.estimate.budget import gpu_memory

    items = gpu_memory(recipe, shape, Hardware(ranks, memory=0, flops=1, bandwidth=1))
    return max(peak(items, moment) for moment in MOMENTS)


def _beside(recipe: Config, shape: "ModelShape", ranks: int) -> Iterator[Room]:
    from exgrpo.train.estimate.budget import cpu_memory, disk
    from exgrpo.train.estimate.options import Options, assumptions_of

    assumed = assumptions_of(Options(), recipe)
    folder = place_of(recipe.output.folder)
    in_memory = sum(amount.bytes for amount in cpu_memory(recipe, shape, ranks, assumed))
    on_disk = sum(amount.bytes for amount in disk(recipe, shape, assumed))
    lower = "`python -m exgrpo.train.estimate --recipe FILE` says what lowers it"
    yield Room("CPU memory", in_memory, free_memory(), f"End other programs, or take a smaller recipe: {lower}.")
    yield Room("disk", on_disk, shutil.disk_usage(folder).free, f"Make room or choose another output.folder; {lower}.")


CHECKS = (Check("memory", check, 0, "The estimate cannot be made: try `python -m exgrpo.train.estimate` alone"),)
