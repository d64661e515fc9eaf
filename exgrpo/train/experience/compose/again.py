"""Prompts come back and are answered anew; no old answer is trained on (prompt replay, arXiv 2603.21177)."""

import numpy as np

from exgrpo.train.experience.supply import Ints, PlannedGroup, Supply
from exgrpo.train.reward.success import EPSILON


def come_back(supply: Supply, most: int) -> Ints:
    """At most so many questions that come back, drawn by their weights.

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
    return supply.draw_from(units.take(places), most, units.question[places])


def with_returning(supply: Supply, asked: int, most: int) -> list[PlannedGroup]:
    """Groups of K fresh answers to so many questions, of which at most `most` come back; these are the last."""
    drawn = come_back(supply, most)
    back = [PlannedGroup(question, supply.samples) for question in drawn.tolist()]
    return [*supply.fresh(asked - len(back), without=drawn), *back]


def compose(supply: Supply) -> list[PlannedGroup]:
    """B groups of K fresh answers; at most floor(rho B) of the prompts come back."""
    return with_returning(supply, supply.batch, supply.share(supply.batch))
