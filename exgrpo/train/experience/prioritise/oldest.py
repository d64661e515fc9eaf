"""First in, first out: what was stored first is replayed first (the delay queue of M2PO, arXiv 2510.01161)."""

import numpy as np

from exgrpo.train.experience.sampling import Priority
from exgrpo.train.experience.settings import Setting
from exgrpo.train.experience.units import Units

NEXT = 1e3
"""Nats between a step and the next: no draw takes a younger unit while there is an older one."""


def prioritise(units: Units, setting: Setting) -> Priority:
    """The strata are the steps; an older step is exhausted before a younger one is drawn from."""
    stratum = units.step - units.step.min()
    return Priority(-NEXT * np.arange(stratum.max() + 1), stratum)
