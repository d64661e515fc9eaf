"""The rate at which this machine multiplies matrices: the limit of what passes through a model can reach."""

import time

import torch

from exgrpo.train.distributed import World

SECONDS = 0.4
LONG = 4e-3
"""Matrices grow until a product takes so many seconds: beside that, its launch is nothing."""
NARROW, WIDE = 512, 8192


def matrix_rate(world: World, dtype: torch.dtype) -> float:
    """FLOP/s of all ranks together in products of two square matrices: each rank's best one within 0.4 s.

    All ranks call it together, so that those which share a machine share it here too. It touches no random state.
    """
    product = _Product(NARROW, world.device, dtype)
    world.gather(None)
    best, end = 0.0, time.perf_counter() + SECONDS
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
