"""How well a step uses the machine: what its phases ask of the model, how long they take, and the limit of both.

Model FLOP utilisation is the share of the machine's matrix rate that the phases of a step use for what they need.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

import torch

from exgrpo.train.common.distributed import World
from exgrpo.train.policy.flops import ForwardFlops, Work

FORWARD = ("select", "generate", "score")
"""Phases that cost a forward pass."""
BACKWARD, FROZEN_BACKWARD = 2, 1
"""Forward passes that a backward costs: weights that are not trained have no gradient to form."""
MEASURED_FOR = 0.4
"""Seconds in which the matrix rate is measured."""
LONG = 4e-3
"""Matrices grow until a product takes so many seconds: beside that, its launch is nothing."""
NARROW, WIDE = 512, 8192


class PhaseClock:
    """Adds up seconds by phase: `with clock("update"): ...`; a phase may be entered more than once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time what is done inside as part of a phase."""
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Utilisation:
    """Compares the work of steps with a limit.

    Attributes:
        model: of the model that computes.
        rate: FLOP/s of all ranks together in products of matrices.
        elsewhere: phases that other machines compute, to which the rate says nothing.
        backward: forward passes that a backward costs.
    """

    model: ForwardFlops
    rate: float
    elsewhere: tuple[str, ...] = ()
    backward: int = BACKWARD

    def at_least(self, rate: float) -> Self:
        """With the better one of two measurements of the rate: what else a machine does can only lower them."""
        return replace(self, rate=max(self.rate, rate))

    def metrics(self, work: Work, numbers: Mapping[str, float]) -> dict[str, float]:
        """The utilisation of a step and of its phases, NaN of those without work.

        Args:
            work: of the step.
            numbers: its seconds, whole and by phase.
        """
        passes = {**dict.fromkeys(FORWARD, 1), "update": 1 + self.backward}
        flops = {
            phase: count * sum(reading.flops(self.model) for reading in work[phase])
            for phase, count in passes.items()
            if phase not in self.elsewhere
        }
        of_phases = {
            f"mfu/{phase}": flops[phase] / (numbers[f"seconds/{phase}"] * self.rate) if flops.get(phase) else math.nan
            for phase in passes
        }
        of_step = sum(flops.values()) / (numbers["seconds"] * self.rate)
        return {"matrix_flops_per_second": self.rate, "mfu": of_step, **of_phases}


def matrix_rate(world: World, dtype: torch.dtype) -> float:
    """FLOP/s of all ranks together in products of two square matrices: each rank's best one within 0.4 s.

    All ranks call it together, so that those which share a machine share it here too. It touches no random state.
    """
    product = _Product(NARROW, world.device, dtype)
    world.gather(None)
    best, end = 0.0, time.perf_counter() + MEASURED_FOR
    while time.perf_counter() < end:
        seconds = product.seconds()
        best = max(best, 2 * product.width**3 / seconds)
        if seconds < LONG and product.width < WIDE:
            product = _Product(2 * product.width, world.device, dtype)
    del product
    if world.device.type != "cpu":
        torch.accelerator.empty_cache()
    return sum(world.gather(best))


class _Product:
    """A product of matrices [width, width] that can be timed; libraries have been loaded for it."""

    def __init__(self, width: int, device: torch.device, dtype: torch.dtype) -> None:
        self.width = width
        self.device = device
        # Random numbers, for on some processors zeros are faster; of a generator of its own.
        block = torch.randn(NARROW, NARROW, generator=torch.Generator(device).manual_seed(0), device=device)
        self.matrix = block.to(dtype).repeat(width // NARROW, width // NARROW)
        self.result = torch.empty_like(self.matrix)
        self.seconds()

    def seconds(self) -> float:
        start = time.perf_counter()
        torch.mm(self.matrix, self.matrix, out=self.result)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter() - start
