"""Prompts come back and are answered anew; no old answer is trained on (prompt replay, arXiv 2603.21177)."""

import numpy as np

from exgrpo.train.experience.supply import PlannedGroup, Supply
from exgrpo.train.reward.success import EPSILON


def compose(supply: Supply) -> list[PlannedGroup]:
    """At most floor(rho B) prompts that come back, drawn by their weights, and fresh ones: K fresh answers to each.

    A prompt may come back if its latest pass rate lies in `band`, at least `cooldown` steps after it was asked, and at
    most `max_uses` times.
    """
    options, units = supply.setting.options, supply.units("prompts")
    low, high = options.band
    rate = units.count / supply.samples
    may = (rate >= low - EPSILON) & (rate <= high + EPSILON) & (units.age >= options.cooldown)
    if options.max_uses is not None:
        may &= units.replays < options.max_uses
    places = np.flatnonzero(may)
    drawn = supply.draw_from(units.take(places), supply.share(supply.batch), units.question[places])
    back = [PlannedGroup(question, supply.samples) for question in drawn.tolist()]
    return [*supply.fresh(supply.batch - len(back), without=drawn), *back]
