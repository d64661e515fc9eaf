"""Single stored answers beside the fresh ones (rollout-level replay, arXiv 2606.04560; FreshPER, arXiv 2604.16918)."""

from collections.abc import Sequence

import numpy as np

from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.supply import PlannedGroup, Supply
from exgrpo.train.records import Group
from exgrpo.train.reward.success import EPSILON


def settle(groups: Sequence[Group], supply: Supply) -> list[Group | PlannedGroup]:
    """The groups whose rewards differ, F answers, and floor(rho F) stored answers of earlier steps.

    Each stored answer is a group by itself, and so has no advantage in it: `advantage` has to be stored. If all groups
    are alike, they stay.
    """
    teaching = [group for group in groups if np.ptp([row.net_reward for row in group.rows]) > EPSILON] or list(groups)
    units, rows = supply.earlier()
    drawn = supply.draw_from(units, supply.share(sum(len(group.fresh) for group in teaching)), rows)
    return [*teaching, *supply.alone(drawn)]


@needs(settle=settle, alone=True)
def compose(supply: Supply) -> list[PlannedGroup]:
    """B groups of K fresh answers."""
    return supply.fresh(supply.batch)
