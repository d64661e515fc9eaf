"""All stored answers to some questions are rehearsed beside a fresh batch (Re:Max and Re:Dr, package remax-rl)."""

from collections.abc import Sequence

from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.supply import PlannedGroup, Supply
from exgrpo.train.records import Group


def settle(groups: Sequence[Group], supply: Supply) -> list[Group | PlannedGroup]:
    """The fresh groups, and all stored answers, also of this step, to at most floor(rho B) questions."""
    table = supply.memory.table
    drawn = supply.draw("buffered", supply.share(supply.batch)).tolist()
    return [*groups, *(PlannedGroup(question, 0, rows=tuple(table.of_question(question))) for question in drawn)]


@needs(settle=settle)
def compose(supply: Supply) -> list[PlannedGroup]:
    """B groups of K fresh answers."""
    return supply.fresh(supply.batch)
