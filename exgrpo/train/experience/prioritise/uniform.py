"""Every success count is as likely (ExGRPO, arXiv 2510.02245: one of its alternatives)."""

import numpy as np

from exgrpo.train.experience.laws import by_count
from exgrpo.train.experience.sampling import Priority
from exgrpo.train.experience.settings import Setting
from exgrpo.train.experience.units import Units


def prioritise(units: Units, setting: Setting) -> Priority:
    """1 for each count that occurs."""
    return by_count(units, lambda k: np.zeros_like(k))
