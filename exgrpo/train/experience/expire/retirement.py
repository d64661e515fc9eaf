"""Solved questions leave for good (ExGRPO, arXiv 2510.02245, section 3.2: the retired set)."""

from exgrpo.train.experience.settings import Setting
from exgrpo.train.experience.units import Expired, Units


def expire(units: Units, setting: Setting) -> Expired:
    """The questions that all answers of the latest step solve."""
    return Expired(questions=units.solved)
