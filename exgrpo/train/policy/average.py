"""Weights that are kept beside the trained ones, and with which the model computes for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from exgrpo.train.policy.states import WEIGHT, States


class KeptWeights:
    """The weights as they are now.

    Args:
        states: of training.

    Attributes:
        weights: [n] fp32 by name, of the part of each that is here; while they are `applied`, the trained ones.
    """

    def __init__(self, states: States) -> None:
        self.states = states
        self.weights = {name: states.get(name, WEIGHT).clone() for name in states.parameters}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model computes with them here; all ranks enter and leave together.

        Where the block fails they stay: the run is at its end, and a rank that fails alone waits for no other.
        """
        self._exchange()
        yield
        self._exchange()

    def _exchange(self) -> None:
        for name, kept in self.weights.items():
            present = self.states.get(name, WEIGHT).clone()
            self.states.set(name, WEIGHT, kept)
            kept.copy_(present)
        self.states.apply()


class Average(KeptWeights):
    """A moving average of the weights (Polyak and Juditsky, 1992), which is evaluated and saved in their place.

    In the average over optimiser steps, each step counts `decay` times as much as the next.

    Args:
        states: of training; the average begins with their weights.
        decay: from 0 to 1.
    """

    def __init__(self, states: States, decay: float) -> None:
        super().__init__(states)
        self.decay = decay

    def update(self) -> None:
        """Take in the weights after an optimiser step."""
        for name, average in self.weights.items():
            average.lerp_(self.states.get(name, WEIGHT), 1 - self.decay)
