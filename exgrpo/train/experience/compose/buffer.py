"""The whole batch is drawn from the buffer, which fresh answers enter (Arnal et al., arXiv 2604.08706)."""

from collections.abc import Sequence

from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.supply import PlannedGroup, Supply
from exgrpo.train.records import Group


def settle(groups: Sequence[Group], supply: Supply) -> Sequence[Group | PlannedGroup]:
    """B K stored answers, as far as there are; a fresh answer is trained on only if it is drawn."""
    if not supply.ratio:  # replay has not begun, and nothing is stored
        return groups
    return supply.alone(supply.draw("stored", supply.batch * supply.samples))


def asked(supply: Supply) -> int:
    """B - floor(rho B), at least 1: so on average an answer is trained on 1 / (1 - rho) times."""
    return max(1, supply.batch - supply.share(supply.batch))


@needs(settle=settle, alone=True, fills=True)
def compose(supply: Supply) -> list[PlannedGroup]:
    """As many groups of K fresh answers as `asked` says."""
    return supply.fresh(asked(supply))
