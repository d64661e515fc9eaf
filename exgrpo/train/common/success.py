"""Definition of a success for training, evaluation and the TRL trainer, and a check that rewards fit it."""

import math
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

EPSILON = 1e-6
"""Rewards that differ by less are equal."""


@overload
def is_success(reward: float, threshold: float) -> bool: ...
@overload
def is_success(reward: npt.NDArray[np.float64], threshold: float) -> npt.NDArray[np.bool_]: ...
def is_success(reward: float | npt.NDArray[np.float64], threshold: float) -> bool | np.bool_ | npt.NDArray[np.bool_]:
    """Return True where a reward, or each of an array of them, reaches the threshold.

    Rounding errors are tolerated: 0.9 in fp32, or 0.2 + 0.7, reaches 0.9.
    """
    return reward >= threshold - EPSILON * max(1.0, abs(threshold))


@dataclass
class RewardWatch:
    """Watch rewards and warn once if they do not fit the success threshold.

    They do not fit if they differ and either none or all of them are successes.

    Args:
        threshold: reward from which on an answer is a success.
        option: name of the threshold's option, for the warning.
        patience: number of answers before a warning.
    """

    threshold: float
    option: str
    patience: int = 256
    answers: int = 0
    lowest: float = math.inf
    highest: float = -math.inf
    warned: bool = False

    def observe(self, rewards: npt.NDArray[np.float64]) -> str | None:
        """Add the rewards of at least one answer; returns the warning when due."""
        self.answers += len(rewards)
        self.lowest = min(self.lowest, float(rewards.min()))
        self.highest = max(self.highest, float(rewards.max()))
        return self.conclude() if self.answers >= self.patience else None

    def conclude(self) -> str | None:
        """Return the warning regardless of `patience`; None if there is none, or it was given."""
        differ = self.highest - self.lowest > EPSILON
        none, every = not is_success(self.highest, self.threshold), is_success(self.lowest, self.threshold)
        if self.warned or not differ or not (none or every):
            return None
        self.warned = True
        remedy = f"set {self.option} to the reward of a right answer"
        if none:
            remedy = f"if {self.highest:g} is the reward of a right answer, set {self.option} to it"
        return (
            f"{'no' if none else 'every'} answer is a success: the rewards of {self.answers} answers lie between "
            f"{self.lowest:g} and {self.highest:g}, and {self.option} is {self.threshold:g}; {remedy}"
        )

    def state(self) -> dict[str, int | float | bool]:
        """Return the state for `restore`."""
        return {name: getattr(self, name) for name in ("answers", "lowest", "highest", "warned")}

    def restore(self, state: dict[str, int | float | bool]) -> None:
        """Continue from the state of another watch."""
        for name, value in state.items():
            setattr(self, "warned" if name == "said" else name, value)  # checkpoints of 0.1.0 have "said"
