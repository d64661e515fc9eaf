"""Format checks of graded answers: required form, presence of any answer, right answers in an unexpected form."""

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
    """An answer to check.

    Attributes:
        response: its text.
        gold: the gold answer.
        reward: name of the reward that grades it.
    """

    response: str
    gold: str
    reward: str


def tell(kind: Kind, config: RewardConfig, answers: Sequence[Graded], world: World) -> list[bool | None]:
    """Apply the rewards' companion functions of this kind to rank 0's N answers; collective.

    Returns:
        [N] on every rank: False if the function fails or times out, None if the reward has no such function.

    Raises:
        RewardError: on every rank, if a reward cannot be loaded.
    """

    def check() -> list[bool | None]:
        functions = {reward: beside(reward, kind) for reward in {answer.reward for answer in answers}}
        checked = [(one.response, one.gold, function) for one in answers if (function := functions[one.reward])]
        grades = _grades(checked, config, config.form)
        for failure in grades.failures:
            warnings.warn(str(failure), stacklevel=2)
        passed = iter(grades.reward)
        return [None if functions[answer.reward] is None else next(passed) > 0 for answer in answers]

    return world.gather(on_main(world, check))[0] or []


def elsewhere(config: RewardConfig, answers: Sequence[Graded], world: World) -> tuple[str, int]:
    """Return the form in which most of rank 0's wrong answers still hold the right value, and their number; collective.

    Each answer is graded again in each of `grading.FORMS` in which it was not graded before: by its reward, or by
    math_no_think in place of a user's reward. Every rank gets the same result; ("", 0) if there is none.
    """

    def search() -> tuple[str, int]:
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

    return world.gather(on_main(world, search))[0] or ("", 0)


def _grades(answers: Sequence[tuple[str, str, str]], config: RewardConfig, form: str) -> Grades:
    rewards = list(dict.fromkeys(reward for *_, reward in answers))
    if not rewards:
        return Grades((), 0, 0, ())
    form = AUTO if all(map(is_own, rewards)) else form
    # One process: a second one might still be starting when the last answer is graded, and would end in a traceback.
    with Grader.of(rewards, config, workers=1, parts={}, form=form) as grader:
        grading = grader.begin()
        for response, gold, reward in answers:
            grading.add(response, gold, reward=reward)
        return grading.finish()
