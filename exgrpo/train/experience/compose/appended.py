"""Stored answers join the fresh groups of their questions (RLEP, arXiv 2507.07451; RePO, arXiv 2506.09340)."""

import dataclasses

from exgrpo.train.experience.supply import PlannedGroup, Supply


def compose(supply: Supply) -> list[PlannedGroup]:
    """B groups of K fresh answers; of the first floor(rho B) each has R stored ones more, as far as there are."""
    groups = supply.fresh(supply.batch)
    most, held = supply.setting.options.replayed, supply.memory.table.held
    joined = supply.share(supply.batch)
    first = [dataclasses.replace(group, choose=min(most, int(held[group.question]))) for group in groups[:joined]]
    # Groups that replay come last, as everywhere.
    return [*groups[joined:], *(one for one in first if not one.choose), *(one for one in first if one.choose)]
