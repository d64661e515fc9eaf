"""Answers that taught something are stored (rollout-level replay, arXiv 2606.04560; POPO, arXiv 2606.01281)."""

from exgrpo.train.experience.settings import Setting
from exgrpo.train.records import Group, Trajectory
from exgrpo.train.reward.success import EPSILON


def admit(group: Group, setting: Setting) -> tuple[Trajectory, ...]:
    """All fresh answers of a group whose rewards differ: all of them have an advantage, or nearly so."""
    rewards = [row.net_reward for row in group.rows]
    return group.fresh if max(rewards) - min(rewards) > EPSILON else ()
