"""Model FLOP utilisation: how much of the machine's matrix rate the phases of a step use for what they need."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from exgrpo.train.metrics.work import Work
from exgrpo.train.pretrained.flops import ForwardFlops

FORWARD = ("select", "generate", "score")
"""Phases that cost a forward pass."""
BACKWARD, FROZEN_BACKWARD = 2, 1
"""Forward passes that a backward costs: weights that are not trained have no gradient to form."""


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
