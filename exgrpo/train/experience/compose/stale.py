"""Every group waits before it is trained on (the delay line with which M2PO, arXiv 2510.01161, studies stale data)."""

from collections.abc import Sequence

import numpy as np

from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.supply import PlannedGroup, Supply, groups_at
from exgrpo.train.records import Group


def settle(groups: Sequence[Group], supply: Supply) -> Sequence[Group | PlannedGroup]:
    """The groups that were written `lag` steps ago; nothing while there are none."""
    if not supply.ratio:  # replay has not begun, and nothing is stored
        return groups
    step = supply.memory.table.column("step")
    return groups_at(supply.memory.table, np.flatnonzero(step == supply.step - supply.setting.options.lag))


@needs(settle=settle, fills=True)
def compose(supply: Supply) -> list[PlannedGroup]:
    """B groups of K fresh answers."""
    return supply.fresh(supply.batch)
