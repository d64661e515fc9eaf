"""Hard questions are less likely (ExGRPO, arXiv 2510.02245: one of its alternatives)."""

import numpy as np

from exgrpo.train.experience.laws import by_count
from exgrpo.train.experience.sampling import Priority
from exgrpo.train.experience.settings import Setting
from exgrpo.train.experience.units import Units


def prioritise(units: Units, setting: Setting) -> Priority:
    """min(k / K, 1/2)."""
    return by_count(units, lambda k: np.log(np.minimum(k / setting.samples, 0.5)))
