"""What can be said of answers besides their rewards: whether they have the needed form, and whether one is found."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

from exgrpo.train.common.distributed import World, on_main
from exgrpo.train.config.options import RewardConfig
from exgrpo.train.reward.names import Kind, beside
from exgrpo.train.reward.pool import Grader


class Graded(NamedTuple):
    """An answer of which something is asked.

    Attributes:
        response: its text.
        gold: the right answer.
        reward: name of the reward that grades it.
    """

    response: str
    gold: str
    reward: str


def tell(kind: Kind, config: RewardConfig, answers: Sequence[Graded], world: World) -> list[bool | None]:
    """What the functions of this kind beside the rewards say of each of rank 0's answers.

    All ranks call it together and get the same: [N], False where it takes too long or fails; None of answers whose
    reward has no such function.

    Raises:
        RewardError: on every rank, where a reward cannot be loaded.
    """

    def ask() -> list[bool | None]:
        functions = {reward: beside(reward, kind) for reward in dict.fromkeys(answer.reward for answer in answers)}
        asked = list(dict.fromkeys(function for function in functions.values() if function is not None))
        if not asked:
            return [None] * len(answers)
        # One process: another one might still be starting when the last answer is told, and would end in a traceback.
        with Grader(
            *asked, workers=1, time_limit=config.time_limit, memory_gib=config.memory_gib, network=config.network
        ) as grader:
            grading = grader.begin()
            for answer in answers:
                if function := functions[answer.reward]:
                    grading.add(answer.response, answer.gold, reward=function)
            grades = grading.finish()
        for failure in grades.failures:
            warnings.warn(str(failure), stacklevel=2)
        told = iter(grades.reward)
        return [None if functions[answer.reward] is None else next(told) > 0 for answer in answers]

    return world.gather(on_main(world, ask))[0] or []
