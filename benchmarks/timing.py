"""Times of rows that took turns, handed to pytest-benchmark; `exgrpo.kernels.timing` measures them.

pytest-benchmark times one test after the other. Here the first row that asks has the whole group measured, round by
round, and each test then reports its own times.
"""

from collections.abc import Sequence
from typing import Any

import torch

BUDGET = {"tiny": 0.0, "small": 4.0, "full": 20.0}
"""Seconds of rounds per group on a CPU."""
GPU_SHARE = 0.25
"""Of that budget on a GPU, whose calls are shorter and steadier."""


def budget(sizes: str, device: torch.device) -> float:
    """Seconds of rounds per group."""
    return BUDGET[sizes] * (GPU_SHARE if device.type == "cuda" else 1.0)


class Clock:
    """A clock that stands still until it is told how long something took: a timer for pytest-benchmark."""

    __name__ = "interleaved"
    now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now


CLOCK = Clock()


def replay(benchmark: Any, seconds: Sequence[float]) -> None:
    """Hand measured times to pytest-benchmark as one round each; its timer must be CLOCK."""
    remaining = iter(seconds)

    def rewind() -> None:
        CLOCK.now = 0.0

    def advance() -> None:
        CLOCK.now = next(remaining)

    benchmark.pedantic(advance, setup=rewind, rounds=len(seconds))
