"""Checks by grading: the form of answers, right answers in an unexpected form, gold answers that cannot be earned."""

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

from exgrpo.train.common.distributed import World, on_main
from exgrpo.train.config.options import RewardConfig
from exgrpo.train.reward.grading import AUTO, FORMS, math_no_think, readable_gold
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


WRITTEN = {AUTO: "\\boxed{%s}", "boxed": "\\boxed{%s}", "tags": "<answer>%s</answer>", "line": "Answer: %s"}
"""Response that states an answer verbatim, by `reward.form`; "hashes" holds digits only."""
UNEARNED = f"{__name__}:unearned"

_NUMBER = re.compile(r"-?[0-9]{1,100}(?:\.[0-9]{1,100})?")
_CHUNK = 512


def unearnable(golds: Iterable[str], options: RewardConfig, *, progress: bool = False) -> set[str]:
    """Return the gold answers for which `math` and `math_no_think` reward no response.

    The response tested repeats the gold answer letter by letter in the form of `reward.form`. Plain numbers can always
    be earned; all others are tested in processes with the limits of grading. A gold answer that exceeds them counts as
    earnable, since a timeout may differ between ranks, which must decide alike.
    """
    tried = {gold: _response(gold, options.form) for gold in dict.fromkeys(golds) if not _NUMBER.fullmatch(gold)}
    found = {gold for gold, response in tried.items() if response is None}
    pairs = [(response, gold) for gold, response in tried.items() if response is not None]
    if not pairs:
        return found
    console = Console(stderr=True)
    starts = range(0, len(pairs), _CHUNK)
    with Grader.of([UNEARNED], options, parts={}, form=AUTO) as grader:
        shown = progress and console.is_terminal
        for start in track(starts, "Reading gold answers", console=console, transient=True, disable=not shown):
            chunk = pairs[start : start + _CHUNK]
            grades = grader.grade(chunk)
            found |= {gold for (_, gold), reward in zip(chunk, grades.reward, strict=True) if reward}
    return found


def _response(gold: str, form: str) -> str | None:
    """Return the graded part of a response that states `gold`; None if this form cannot express it."""
    if form == "hashes":  # any number can be written in decimals, so a box is tested instead
        return f"\\boxed{{{gold}}}" if re.search("[0-9]", gold) else None
    return decisive_part_of(DEFAULT, form)(WRITTEN[form] % gold)


def unearned(response: str, gold: str) -> float:
    """Return 1.0 if `response` gets no reward of this package, else 0.0."""
    return float(not (readable_gold(gold) and math_no_think(response, gold)))
