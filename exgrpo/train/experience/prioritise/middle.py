"""The prompts nearest to one half (prompt replay, arXiv 2603.21177)."""

import numpy as np

from exgrpo.train.experience.laws import by_count
from exgrpo.train.experience.sampling import Priority
from exgrpo.train.experience.settings import Setting
from exgrpo.train.experience.units import Units

NEXT = 1e3
"""Nats for a whole of pass rate: no draw takes a farther prompt while there is a nearer one."""


def prioritise(units: Units, setting: Setting) -> Priority:
    """By |p - 1/2| of the latest pass rate p, the nearest first; equal ones at random."""
    return by_count(units, lambda k: -NEXT * setting.samples * np.abs(k / setting.samples - 0.5))
