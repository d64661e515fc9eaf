"""Every fresh answer is stored (Arnal et al., arXiv 2604.08706; RePO, arXiv 2506.09340)."""

from exgrpo.train.experience.settings import Setting
from exgrpo.train.records import Group, Trajectory


def admit(group: Group, setting: Setting) -> tuple[Trajectory, ...]:
    """All fresh answers, right or wrong."""
    return group.fresh
