"""Fresh questions in their order, with a trace in each group that has one (LUFFY, arXiv 2504.14945)."""

import dataclasses

from exgrpo.train.experience.supply import PlannedGroup, Supply, with_stored


def compose(supply: Supply) -> list[PlannedGroup]:
    """B groups of K answers, of which the first floor(rho B) have R stored ones, as far as there are.

    Which questions come next, their stored answers do not decide; see `mixed` for that. At least one answer is fresh.
    """
    most = min(supply.setting.options.replayed, supply.samples - 1)
    groups = with_stored(supply, supply.fresh(supply.batch), most)
    return [dataclasses.replace(group, fresh=group.fresh - group.choose) for group in groups]
