"""A moving average of the weights (Polyak and Juditsky, 1992), which is evaluated and saved in their place."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from exgrpo.train.policy.states import WEIGHT, States


class Average:
    """The average of the trained weights over optimiser steps, each one counting `decay` times as much as the next.

    Args:
        states: of training; the average begins with their weights.
        decay: from 0 to 1.

    Attributes:
        weights: [n] fp32 by name, of the part of each that is here.
    """

    def __init__(self, states: States, decay: float) -> None:
        self.states = states
        self.decay = decay
        self.weights = {name: states.get(name, WEIGHT).clone() for name in states.parameters}

    def update(self) -> None:
        """Take in the weights after an optimiser step."""
        for name, average in self.weights.items():
            average.lerp_(self.states.get(name, WEIGHT), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model computes with the average here; all ranks enter and leave together."""
        trained = {name: self.states.get(name, WEIGHT).clone() for name in self.weights}
        self._put(self.weights)
        try:
            yield
        finally:
            self._put(trained)

    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, values in weights.items():
            self.states.set(name, WEIGHT, values)
        self.states.apply()
