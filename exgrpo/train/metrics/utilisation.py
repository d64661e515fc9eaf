"""Model FLOP utilisation (MFU) of a step and its phases, relative to the measured rate of matrix products."""

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
"""Phases that cost one forward pass."""
BACKWARD, FROZEN_BACKWARD = 2, 1
"""Cost of a backward pass in forward passes; frozen weights need no gradient."""
MEASURED_FOR = 0.4
"""Seconds for measuring the matrix rate."""
LONG = 4e-3
"""Matrices grow until a product takes this many seconds, so that launch overhead is negligible."""
NARROW, WIDE = 512, 8192


class PhaseClock:
    """Adds up seconds by phase: `with clock("update"): ...`; a phase may be entered more than once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to a phase."""
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Utilisation:
    """Computes MFU from the work of a step.

    Attributes:
        model: FLOPs of the model's forward pass.
        rate: FLOP/s of matrix products, summed over ranks.
        elsewhere: phases computed on other machines, which are left out.
        backward: cost of a backward pass in forward passes.
    """

    model: ForwardFlops
    rate: float
    elsewhere: tuple[str, ...] = ()
    backward: int = BACKWARD

    def at_least(self, rate: float) -> Self:
        """Use the larger of two measured rates: other load on a machine can only lower a measurement."""
        return replace(self, rate=max(self.rate, rate))

    def metrics(self, work: Work, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return the MFU of a step and of its phases, given its metrics of seconds; NaN for phases without work."""
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
    """Measure FLOP/s of square matrix products: each rank's best within 0.4 s, summed over ranks.

    A collective call, so that ranks on one machine compete for it here, too. It does not change the random state.
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
    """Timed product of matrices [width, width], warmed up."""

    def __init__(self, width: int, device: torch.device, dtype: torch.dtype) -> None:
        self.width = width
        self.device = device
        # Random numbers, since zeros are faster on some processors; a separate generator keeps the random state.
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
