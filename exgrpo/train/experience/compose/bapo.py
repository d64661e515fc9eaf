"""Batch adaptation (BAPO, arXiv 2602.20722): groups that teach little give way to hard prompts and stored groups."""

from collections.abc import Sequence

import numpy as np

from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.supply import PlannedGroup, Supply, draw_groups
from exgrpo.train.records import Group


def settle(groups: Sequence[Group], supply: Supply) -> list[Group | PlannedGroup]:
    """The first B of: fresh groups that teach, hard prompts that went better this time, and stored groups.

    A fresh group teaches with a pass rate in [1/K, (K-1)/K]. Stored groups are those that `admit` has kept, to other
    questions. If no fresh group teaches, all of them stay.
    """
    memory, samples = supply.memory, supply.samples
    fresh, hard = groups[: supply.batch], groups[supply.batch :]
    teaching = [group for group in fresh if 1 <= memory.shown[group.question] <= samples - 1] or list(fresh)
    improved = [group for group in hard if memory.shown[group.question] > memory.earlier[group.question]]
    batch = [*teaching, *improved][: supply.batch]
    return [*batch, *draw_groups(supply, supply.batch - len(batch), {group.question for group in batch})]


@needs(settle=settle, fills=True)
def compose(supply: Supply) -> list[PlannedGroup]:
    """B groups of K fresh answers; in every second step floor(rho B) hard prompts are answered again beside them.

    A prompt is hard if its latest pass rate is at most `hard`.
    """
    fresh = supply.fresh(supply.batch)
    if supply.step % 2:
        return fresh
    units = supply.units("prompts")
    limit = supply.setting.options.hard * supply.samples
    places = np.flatnonzero((units.count <= limit) & ~np.isin(units.question, [group.question for group in fresh]))
    names = units.question[places]
    drawn = supply.draw_from(units.take(places), supply.share(supply.batch), names)
    return [*fresh, *(PlannedGroup(question, supply.samples) for question in drawn.tolist())]
