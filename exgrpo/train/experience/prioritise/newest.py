"""Last in, first out: the latest is nearest to the current policy (POPO, arXiv 2606.01281)."""

import numpy as np

from exgrpo.train.experience.sampling import Priority
from exgrpo.train.experience.settings import Setting
from exgrpo.train.experience.units import Units

NEXT = 1e3
"""Nats between a step and the next: no draw takes an older unit while there is a younger one."""


def prioritise(units: Units, setting: Setting) -> Priority:
    """The strata are the steps; a younger step is exhausted before an older one is drawn from."""
    stratum = units.step - units.step.min()
    return Priority(NEXT * np.arange(stratum.max() + 1), stratum)
