"""Everything is as likely, whatever is known of it (Arnal et al., arXiv 2604.08706; the ablation of ExGRPO)."""

from exgrpo.train.experience.sampling import Priority
from exgrpo.train.experience.settings import Setting
from exgrpo.train.experience.units import Units


def prioritise(units: Units, setting: Setting) -> Priority:
    """No weights."""
    return Priority()
