"""What is fresh and was rewarded (FreshPER, arXiv 2604.16918)."""

import numpy as np

from exgrpo.train.experience.sampling import Priority
from exgrpo.train.experience.settings import Setting
from exgrpo.train.experience.units import Units

POWER, SMALLEST = 0.6, 1e-6
"""The power of a priority, and what is added to a reward so that one of 0 has a priority, too."""


def prioritise(units: Units, setting: Setting) -> Priority:
    """(|reward| exp(-age / age_scale))^0.6: the published code's priority where there is no critic."""
    log_weight = np.log(np.abs(units.reward) + SMALLEST)
    log_weight -= units.age / setting.options.age_scale
    log_weight *= POWER
    return Priority(log_weight)
