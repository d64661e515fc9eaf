"""What surprised most (rollout-level replay, arXiv 2606.04560)."""

import numpy as np

from exgrpo.train.experience.sampling import Priority
from exgrpo.train.experience.settings import Setting
from exgrpo.train.experience.units import Units

SMALLEST = 1e-6
"""Added, so that an answer without an advantage has a weight, too."""


def prioritise(units: Units, setting: Setting) -> Priority:
    """|A|^(1/2) of the advantage in the group that the answer was written in."""
    return Priority(0.5 * np.log(np.abs(units.advantage) + SMALLEST))
