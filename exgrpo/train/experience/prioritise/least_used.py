"""What has been replayed least comes next, so that all take turns (the round robin of Re:Max, package remax-rl)."""

import numpy as np

from exgrpo.train.experience.sampling import Priority
from exgrpo.train.experience.settings import Setting
from exgrpo.train.experience.units import Units

NEXT = 1e3
"""Nats between a number of replays and the next: no draw takes a unit while there is one that had fewer."""


def prioritise(units: Units, setting: Setting) -> Priority:
    """The strata are the numbers of replays, the lowest first; equal ones at random."""
    return Priority(-NEXT * np.arange(units.replays.max() + 1), units.replays)
