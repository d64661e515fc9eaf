"""Forgetting: functions `(candidates, options) -> Expired`.

`candidates` are all stored trajectories, `candidates.now` is the step that is planned next, and `candidates.solved` are
the questions that all answers of the latest step solve.
"""

import numpy as np

from exgrpo.train.common.success import EPSILON
from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.replay.candidates import Candidates, Expired


def retirement(candidates: Candidates, options: MethodOptions) -> Expired:
    """Retire the questions that all answers of the latest step solve (ExGRPO, arXiv 2510.02245, section 3.2)."""
    return Expired(questions=candidates.solved)


def above_band(candidates: Candidates, options: MethodOptions) -> Expired:
    """Drop the answers to questions whose latest pass rate exceeds the upper end of `band`; these are still asked.

    SU-01, arXiv 2605.13301, whose retired questions leave the replay alone.
    """
    return Expired(candidates.count > options.samples * (options.experience.band[1] + EPSILON))


def age(candidates: Candidates, options: MethodOptions) -> Expired:
    """Drop trajectories written more than `max_age` steps before the step to plan (arXiv 2606.04560, and others)."""
    most = options.experience.max_age
    assert most is not None
    return Expired(candidates.age > most)


def uses(candidates: Candidates, options: MethodOptions) -> Expired:
    """Drop trajectories that were replayed `max_uses` times."""
    most = options.experience.max_uses
    assert most is not None
    return Expired(candidates.replays >= most)


def capacity(candidates: Candidates, options: MethodOptions) -> Expired:
    """Drop all but the latest `capacity` trajectories; they come in the order in which they were stored.

    Arnal et al., arXiv 2604.08706; RePO, arXiv 2506.09340, does so for each question.
    """
    most = options.experience.capacity
    assert most is not None
    return Expired(np.arange(len(candidates)) < len(candidates) - most)
