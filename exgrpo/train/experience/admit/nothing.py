"""Nothing is stored: what is replayed are prompts, or traces that were given at the start."""

from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.settings import Setting
from exgrpo.train.records import Group, Trajectory


@needs(distinct="response")  # of what a run starts with
def admit(group: Group, setting: Setting) -> tuple[Trajectory, ...]:
    """No answer."""
    return ()
