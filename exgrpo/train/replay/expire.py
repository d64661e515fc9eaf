"""What is forgotten: functions `(units, setting) -> Expired`.

`units` are all stored trajectories, `units.now` the step that is planned next, and `units.solved` the questions that
all answers of the latest step solve.
"""

import numpy as np

from exgrpo.train.config.replay import Setting
from exgrpo.train.replay.candidates import Expired, Units


def retirement(units: Units, setting: Setting) -> Expired:
    """The questions that all answers of the latest step solve, for good (ExGRPO, arXiv 2510.02245, section 3.2)."""
    return Expired(questions=units.solved)


def age(units: Units, setting: Setting) -> Expired:
    """What was written more than `max_age` steps before the step that is planned (arXiv 2606.04560, and others)."""
    most = setting.options.max_age
    assert most is not None
    return Expired(units.age > most)


def uses(units: Units, setting: Setting) -> Expired:
    """What has been replayed `max_uses` times."""
    most = setting.options.max_uses
    assert most is not None
    return Expired(units.replays >= most)


def capacity(units: Units, setting: Setting) -> Expired:
    """All but the latest `capacity` trajectories, which come in the order in which they were stored.

    Arnal et al., arXiv 2604.08706; RePO, arXiv 2506.09340, does so for each question.
    """
    most = setting.options.capacity
    assert most is not None
    return Expired(np.arange(len(units)) < len(units) - most)
