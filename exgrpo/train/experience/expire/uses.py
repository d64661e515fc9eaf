"""What has been replayed often enough is forgotten."""

from exgrpo.train.experience.settings import Setting
from exgrpo.train.experience.units import Expired, Units


def expire(units: Units, setting: Setting) -> Expired:
    """What has been replayed `max_uses` times."""
    most = setting.options.max_uses
    assert most is not None
    return Expired(units.replays >= most)
