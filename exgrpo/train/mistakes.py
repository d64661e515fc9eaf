"""What is wrong with the options of a recipe or of a command line, in one line."""

import difflib
from collections.abc import Iterable

from pydantic import BaseModel, ValidationError

from exgrpo.train.dotted import joined, known_keys
from exgrpo.train.errors import SHOWN, cut, shown

SHOWN_PROBLEMS = 10
REFUSED = {
    "rollout.top_p": "training samples from the whole distribution, because importance ratios compare probabilities "
    "under it: leave this out, and lower rollout.temperature for likelier answers (evaluation.top_p is free)",
    "data.sources": "a list of settings, which a recipe holds and a command line cannot",
    "experience.question_weight": "the law of questions is experience.prioritise",
    "experience.retire": "solved questions leave by the function retirement of experience.expire: --experience.expire "
    "without a value keeps them",
    "objective.importance_correction": "False is objective.weigh=uncorrected",
}
"""Keys that users of other trainers or of earlier versions look for, and what to do instead."""


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The known key that was probably meant; one that only lacks its section comes before those of other words."""
    keys = list(known)
    inner = [one for one in keys if one.endswith(f".{key}")]
    return next(iter(inner or difflib.get_close_matches(key, keys, n=1, cutoff=0.5)), None)


def explain(error: ValidationError, model: type[BaseModel], origin: str, section: str = "") -> str:
    """What is wrong with the values of a model, or of one of its sections; of an unknown key the near one.

    Args:
        error: what checking them gave.
        model: has the keys.
        origin: of the values: a file, or "command line".
        section: of all values; empty: they are the whole model's.
    """
    lines = []
    for problem in error.errors()[:SHOWN_PROBLEMS]:
        key = cut(joined(part for part in (section, *problem["loc"]) if part != ""), SHOWN)
        if problem["type"] == "extra_forbidden" and key in REFUSED:
            lines.append(f"{key}: {REFUSED[key]}")
        elif problem["type"] == "extra_forbidden":
            near = nearest(key, known_keys(model))
            lines.append(f"unknown key {key!r}" + (f"; did you mean {near!r}?" if near else ""))
        elif problem["type"] == "missing":
            lines.append(f"{key} is missing")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{key}: {message} (got {shown(problem['input'])})" if key else message)
    more = error.error_count() - len(lines)
    return f"{origin}: " + "; ".join(lines) + (f"; and {more} more" if more else "")
