"""Resolve rewards by name.

A reward is a deterministic function (response, gold) -> finite number. It may take columns of the question's row, grade
several answers in a call or be asynchronous, and return several named numbers, its parts: see
exgrpo.train.reward.contract. Names: "math" and "math_no_think", functions of exgrpo.train.reward.grading, or a Python
path: "package.module:function" for an importable module, "path/to/file.py:function" for a file.

A reward may have companion functions, which also take (response, gold). They are named like the reward with the suffix
"_form", "_found" or "_key" ("math_form" for "math", "my_rewards.py:score_form" for "my_rewards.py:score"), and `beside`
finds them. The form and the found function return 1.0 or 0.0, whether the answer is right or wrong: the first checks
the form in which the reward looks for an answer, the second whether the reward finds any answer. The key function
returns a text, the canonical form of the solution: answers that differ only in form have the same key. An empty text is
no key.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

from exgrpo.train.common.errors import RewardError, nearest, shown
from exgrpo.train.common.functions import load_function, load_place
from exgrpo.train.reward.contract import contract_of
from exgrpo.train.reward.grading import AUTO, FORMS, math_no_think_part, math_part

Reward = Callable[..., Any]
Key = Callable[[str, str], str]
Kind = Literal["form", "found", "key"]
"""Kind of a reward's companion function."""

BUILTIN = {"math": math_part, "math_no_think": math_no_think_part}
"""Rewards of exgrpo.train.reward.grading by bare name, each with the function that returns the part it grades."""
DEFAULT = "math_no_think"
"""Reward of questions whose source brings none."""


def is_own(name: str) -> bool:
    """Return True if a reward is the user's: neither its module nor its file belongs to this package."""
    return not name.startswith("exgrpo.") and name not in BUILTIN


def resolve_reward(name: str) -> Reward:
    """Return the reward function called `name`.

    Raises:
        RewardError: the name is unknown (the message suggests a near one), its module or file is missing or cannot be
            imported, it lacks the attribute, or the signature does not fit exgrpo.train.reward.contract.
    """
    function = load_function(_place(name), "reward", RewardError)
    contract_of(function, name)
    return function


def resolve_key(name: str) -> Key | None:
    """Return the key function of the reward called `name`, None without one; raises as `resolve_reward` does."""
    found = beside(name, "key")
    return None if found is None else cast(Key, resolve_reward(found))


def beside(name: str, kind: Kind) -> str | None:
    """Return the name of the companion function of this kind of the reward called `name`, None without one.

    Raises RewardError for a module or file that cannot be loaded, as `resolve_reward` does.
    """
    found = f"{_place(name)}_{kind}"
    module = load_place(found, "reward", RewardError)
    return found if callable(getattr(module, found.rpartition(":")[2], None)) else None


def decisive_part_of(name: str, form: str = AUTO) -> Callable[[str], str | None]:
    """Return the function that extracts the part of a response on which its grade depends; None: the grade is 0.

    With a `form` of `grading.FORMS`, only an answer in this form counts; a user's reward gets the whole response.
    """
    part: Callable[[str], str | None] = BUILTIN.get(name, lambda response: response)
    if form == AUTO or is_own(name):
        return part

    def in_form(response: str) -> str | None:
        answer = FORMS[form].alone(response)
        return None if answer is None else part(answer)

    return in_form


def absolute(reward: str) -> str:
    """Return a reward's name with an absolute file path: the processes may have another working directory."""
    place, _, attribute = reward.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{attribute}" if place.endswith(".py") else reward


def _place(name: str) -> str:
    if name in BUILTIN:
        return f"exgrpo.train.reward.grading:{name}"
    if not all(name.rpartition(":")[::2]):
        near = nearest(name, BUILTIN)
        hint = f"; did you mean {near!r}?" if near else "."
        raise RewardError(
            f"unknown reward {shown(name)}{hint} Known: {', '.join(BUILTIN)}, 'package.module:function' and "
            "'path/to/file.py:function'"
        )
    return name
