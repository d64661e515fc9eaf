"""One success for each different solution, so that a frequent one does not fill the buffer (Re:Max keeps modes so)."""

from exgrpo.train.experience.admit import successes
from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.settings import Setting
from exgrpo.train.records import Group, Trajectory


@needs(distinct="key")
def admit(group: Group, setting: Setting) -> list[Trajectory]:
    """The successes of a group; of those to a question that have the same solution key the memory keeps the newest."""
    return successes.admit(group, setting)
