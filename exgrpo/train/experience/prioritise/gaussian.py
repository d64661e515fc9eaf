"""The Gaussian law over success counts (ExGRPO, arXiv 2510.02245, section 3.2)."""

from exgrpo.train.experience.laws import by_count
from exgrpo.train.experience.sampling import Priority
from exgrpo.train.experience.settings import Setting
from exgrpo.train.experience.units import Units


def prioritise(units: Units, setting: Setting) -> Priority:
    """exp(-(k - mu K)^2 / (2 sigma^2)), sigma in counts: medium difficulty is likeliest."""
    of = setting.options
    return by_count(units, lambda k: -((k - of.mu * setting.samples) ** 2) / (2 * of.sigma**2))
