"""What a success is: the one rule of training, evaluation and the TRL trainer, and whether rewards fit it."""

import math
from dataclasses import asdict, dataclass
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
    """Whether a reward, or each of an array of them, is at least the threshold.

    What rounding takes away does not count: 0.9 in fp32, or 0.2 + 0.7, reaches 0.9.
    """
    return reward >= threshold - EPSILON * max(1.0, abs(threshold))


@dataclass
class RewardWatch:
    """Watches rewards and says once where they do not fit the threshold of a success.

    They do not fit where they differ and either none or every one of them is a success.

    Args:
        threshold: a reward of at least this is a success.
        option: name of the threshold's option, for the sentence.
        patience: so many answers are seen before anything is said.
    """

    threshold: float
    option: str
    patience: int = 256
    answers: int = 0
    lowest: float = math.inf
    highest: float = -math.inf
    said: bool = False

    def observe(self, rewards: npt.NDArray[np.float64]) -> str | None:
        """Take in the rewards of some answers, at least one; returns the sentence where it is time to say one."""
        self.answers += len(rewards)
        self.lowest = min(self.lowest, float(rewards.min()))
        self.highest = max(self.highest, float(rewards.max()))
        return self.conclude() if self.answers >= self.patience else None

    def conclude(self) -> str | None:
        """The sentence, however few answers were seen; None: there is none, or it was said."""
        differ = self.highest - self.lowest > EPSILON
        none, every = not is_success(self.highest, self.threshold), is_success(self.lowest, self.threshold)
        if self.said or not differ or not (none or every):
            return None
        self.said = True
        remedy = f"set {self.option} to the reward of a right answer"
        if none:
            remedy = f"if {self.highest:g} is the reward of a right answer, set {self.option} to it"
        return (
            f"{'no' if none else 'every'} answer is a success: the rewards of {self.answers} answers lie between "
            f"{self.lowest:g} and {self.highest:g}, and {self.option} is {self.threshold:g}; {remedy}"
        )

    def state(self) -> dict[str, int | float | bool]:
        """What it has seen, for `restore`."""
        return {name: value for name, value in asdict(self).items() if name in ("answers", "lowest", "highest", "said")}

    def restore(self, state: dict[str, int | float | bool]) -> None:
        """Go on from the state of another watch."""
        for name, value in state.items():
            setattr(self, name, value)
