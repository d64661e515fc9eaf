"""Stored groups in place of groups without a gradient (POPO, arXiv 2606.01281)."""

from collections.abc import Sequence

import numpy as np

from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.supply import PlannedGroup, Supply, draw_groups
from exgrpo.train.records import Group
from exgrpo.train.reward.success import EPSILON


def settle(groups: Sequence[Group], supply: Supply) -> list[Group | PlannedGroup]:
    """At most floor(rho B) of the groups whose rewards are all alike give way to stored groups of earlier steps."""
    spread = [np.ptp([row.net_reward for row in group.rows]) for group in groups]
    alive = [group for group, of_group in zip(groups, spread, strict=True) if of_group > EPSILON]
    dead = [group for group, of_group in zip(groups, spread, strict=True) if of_group <= EPSILON]
    stored = draw_groups(supply, min(len(dead), supply.share(supply.batch)))
    return [*alive, *dead[len(stored) :], *stored]


@needs(settle=settle, fills=True)
def compose(supply: Supply) -> list[PlannedGroup]:
    """B groups of K fresh answers."""
    return supply.fresh(supply.batch)
