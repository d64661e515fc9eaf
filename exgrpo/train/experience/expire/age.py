"""What is too old is forgotten (a maximum age is part of rollout-level replay, arXiv 2606.04560, and of others)."""

from exgrpo.train.experience.settings import Setting
from exgrpo.train.experience.units import Expired, Units


def expire(units: Units, setting: Setting) -> Expired:
    """What was written more than `max_age` steps before the step that is planned."""
    most = setting.options.max_age
    assert most is not None
    return Expired(units.age > most)
