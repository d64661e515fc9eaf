"""Successes are stored (ExGRPO, arXiv 2510.02245, section 3.2)."""

from exgrpo.train.experience.buckets import BUCKETS
from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.settings import Setting
from exgrpo.train.records import Group, Trajectory


@needs(distinct="response")
def admit(group: Group, setting: Setting) -> list[Trajectory]:
    """The fresh answers that are successes; of continuous rewards those that beat their group's mean."""
    return BUCKETS[setting.options.bucket_by].admitted(group, setting.success)
