"""Stored answers join the fresh groups of their questions (RLEP, arXiv 2507.07451; RePO, arXiv 2506.09340)."""

from exgrpo.train.experience.supply import PlannedGroup, Supply, with_stored


def compose(supply: Supply) -> list[PlannedGroup]:
    """B groups of K fresh answers; the first floor(rho B) have R stored ones more, as far as there are."""
    return with_stored(supply, supply.fresh(supply.batch), supply.setting.options.replayed)
