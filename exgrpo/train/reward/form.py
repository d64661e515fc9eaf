"""What can be said of answers besides their rewards: whether they have the needed form, and whether one is found."""

from collections.abc import Sequence

from exgrpo.train.config import RewardConfig
from exgrpo.train.distributed import World, on_main
from exgrpo.train.reward.names import Kind, beside
from exgrpo.train.reward.pool import Grader


def tell(kind: Kind, reward: RewardConfig, answers: Sequence[tuple[str, str]], world: World) -> list[bool] | None:
    """What the function of this kind beside the reward says of each of rank 0's (response, gold) pairs.

    All ranks call it together and get the same: [N], False where it takes too long or fails; None where the reward has
    no such function.

    Raises:
        RewardError: on every rank, where the reward cannot be loaded.
    """

    def ask() -> list[bool] | None:
        function = beside(reward.function, kind)
        if function is None:
            return None
        # One process: another one might still be starting when the last answer is told, and would end in a traceback.
        with Grader(function, workers=1, time_limit=reward.time_limit) as grader:
            return [value > 0 for value in grader.grade(answers).reward]

    return world.gather(on_main(world, ask))[0]
