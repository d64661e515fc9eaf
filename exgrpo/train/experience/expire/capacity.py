"""First in, first out (Arnal et al., arXiv 2604.08706; RePO, arXiv 2506.09340, does so for each question)."""

import numpy as np

from exgrpo.train.experience.settings import Setting
from exgrpo.train.experience.units import Expired, Units


def expire(units: Units, setting: Setting) -> Expired:
    """All but the latest `capacity` trajectories; they come in the order in which they were stored."""
    most = setting.options.capacity
    assert most is not None
    return Expired(np.arange(len(units)) < len(units) - most)
