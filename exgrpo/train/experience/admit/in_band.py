"""Whole groups of middling difficulty are stored (the high-quality groups of BAPO, arXiv 2602.20722)."""

from exgrpo.train.experience.difficulty import count_successes
from exgrpo.train.experience.settings import Setting
from exgrpo.train.records import Group, Trajectory
from exgrpo.train.reward.success import EPSILON


def admit(group: Group, setting: Setting) -> tuple[Trajectory, ...]:
    """All fresh answers of a group whose pass rate m / F lies in `band`."""
    evidence = count_successes(group, setting.success)
    low, high = setting.options.band
    return group.fresh if low - EPSILON <= evidence.successes / evidence.rows <= high + EPSILON else ()
