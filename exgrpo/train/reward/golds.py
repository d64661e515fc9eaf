"""Find gold answers for which no response can earn a reward of this package."""

import re
from collections.abc import Iterable

from rich.console import Console
from rich.progress import track

from exgrpo.train.config.options import RewardConfig
from exgrpo.train.reward.grading import AUTO, math_no_think, readable_gold
from exgrpo.train.reward.names import DEFAULT, decisive_part_of
from exgrpo.train.reward.pool import Grader

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

    Args:
        golds: answers of questions with these rewards; duplicates are tested once.
        options: options of the run's rewards.
        progress: show a progress bar on a terminal.
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
