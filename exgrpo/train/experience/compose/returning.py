"""The batch is drawn from the buffer, and half of the questions that fill it are ones that were neither easy nor hard.

Own work: the buffer of Arnal et al. (arXiv 2604.08706) with prompt replay (arXiv 2603.21177).
"""

from exgrpo.train.experience.compose.again import with_returning
from exgrpo.train.experience.compose.buffer import asked, settle
from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.supply import PlannedGroup, Supply


@needs(settle=settle, alone=True, fills=True)
def compose(supply: Supply) -> list[PlannedGroup]:
    """B - floor(rho B) groups of K fresh answers; at most half of their prompts come back.

    What is trained on are B K stored answers, as in `buffer`.
    """
    count = asked(supply)
    return with_returning(supply, count, count // 2 if supply.ratio else 0)
