"""Forgetting: functions `(units, options) -> Expired`.

`units` are all stored trajectories, `units.now` the step that is planned next, and `units.solved` the questions that
all answers of the latest step solve.
"""

import numpy as np

from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.replay.candidates import Expired, Units


def retirement(units: Units, options: MethodOptions) -> Expired:
    """Retire the questions that all answers of the latest step solve (ExGRPO, arXiv 2510.02245, section 3.2)."""
    return Expired(questions=units.solved)


def age(units: Units, options: MethodOptions) -> Expired:
    """Drop trajectories written more than `max_age` steps before the step to plan (arXiv 2606.04560, and others)."""
    most = options.experience.max_age
    assert most is not None
    return Expired(units.age > most)


def uses(units: Units, options: MethodOptions) -> Expired:
    """Drop trajectories that were replayed `max_uses` times."""
    most = options.experience.max_uses
    assert most is not None
    return Expired(units.replays >= most)


def capacity(units: Units, options: MethodOptions) -> Expired:
    """Drop all but the latest `capacity` trajectories; they come in the order in which they were stored.

    Arnal et al., arXiv 2604.08706; RePO, arXiv 2506.09340, does so for each question.
    """
    most = options.experience.capacity
    assert most is not None
    return Expired(np.arange(len(units)) < len(units) - most)
