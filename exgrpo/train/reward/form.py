"""What can be said of answers besides their rewards: whether they have the needed form, whether one is found, and
whether the right one stands in another form than the one that is read."""

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from exgrpo.train.common.distributed import World, on_main
from exgrpo.train.config.options import RewardConfig
from exgrpo.train.reward.grading import AUTO, FORMS
from exgrpo.train.reward.names import DEFAULT, Kind, beside, decisive_part_of, is_own
from exgrpo.train.reward.pool import Grader, Grades


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
        functions = {reward: beside(reward, kind) for reward in {answer.reward for answer in answers}}
        asked = [(one.response, one.gold, function) for one in answers if (function := functions[one.reward])]
        grades = _grades(asked, config, config.form)
        for failure in grades.failures:
            warnings.warn(str(failure), stacklevel=2)
        told = iter(grades.reward)
        return [None if functions[answer.reward] is None else next(told) > 0 for answer in answers]

    return world.gather(on_main(world, ask))[0] or []


def elsewhere(config: RewardConfig, answers: Sequence[Graded], world: World) -> tuple[str, int]:
    """The form in which most of rank 0's wrong answers hold the right value all the same, and how many do so.

    Each answer is graded again as it stands in each of `grading.FORMS`, unless that is what has been graded: by its
    reward, and by math_no_think in the place of a reward of the user's own. All ranks call it together and get the
    same; ("", 0) where there is none.
    """

    def ask() -> tuple[str, int]:
        names, texts = [], []
        for answer in answers:
            reward = DEFAULT if is_own(answer.reward) else answer.reward
            read = decisive_part_of(answer.reward, config.form)(answer.response)
            for name, form in FORMS.items():
                alone = form.alone(answer.response)
                if alone is not None and decisive_part_of(reward)(alone) != read:
                    names.append(name)
                    texts.append((alone, answer.gold, reward))
        grades = _grades(texts, config, AUTO)
        right = Counter(name for name, reward in zip(names, grades.reward, strict=True) if reward >= 1.0)
        return max(right.items(), key=lambda one: one[1], default=("", 0))

    return world.gather(on_main(world, ask))[0] or ("", 0)


def _grades(answers: Sequence[tuple[str, str, str]], config: RewardConfig, form: str) -> Grades:
    """Of answers (response, gold, reward)."""
    rewards = list(dict.fromkeys(reward for *_, reward in answers))
    if not rewards:
        return Grades((), 0, 0, ())
    form = AUTO if all(map(is_own, rewards)) else form
    # One process: another one might still be starting when the last answer is told, and would end in a traceback.
    with Grader.of(rewards, config, workers=1, parts={}, form=form) as grader:
        grading = grader.begin()
        for response, gold, reward in answers:
            grading.add(response, gold, reward=reward)
        return grading.finish()
