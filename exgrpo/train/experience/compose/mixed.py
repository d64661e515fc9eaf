"""Replayed answers take the places of fresh ones in some groups (ExGRPO, arXiv 2510.02245; LUFFY, arXiv 2504.14945)."""

from exgrpo.train.experience.supply import PlannedGroup, Supply


def compose(supply: Supply) -> list[PlannedGroup]:
    """n = min(floor(rho B), |E|) groups of K - R fresh and R replayed answers, and B - n of K fresh ones.

    R is the option `replayed`, or less where a question has fewer stored answers; at least one answer is fresh. A
    question is in the batch once at most. Where too few are left unretired, the batch is smaller.
    """
    drawn = supply.draw("buffered", supply.share(supply.batch))
    most = min(supply.setting.options.replayed, supply.samples - 1)
    replayed = [min(most, held) for held in supply.memory.table.held[drawn].tolist()]
    mixed = [
        PlannedGroup(question, supply.samples - several, several)
        for question, several in zip(drawn.tolist(), replayed, strict=True)
    ]
    return [*supply.fresh(supply.batch - len(drawn), without=drawn), *mixed]
