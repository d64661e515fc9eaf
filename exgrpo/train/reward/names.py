"""Rewards by name.

A reward is a deterministic function (response, gold) -> finite number. It may take columns of the question's row, grade
several answers in a call or be asynchronous, and return several named numbers, its parts: see
exgrpo.train.reward.contract. Names: "math" and "math_no_think", functions of exgrpo.train.reward.grading, or a Python
path: "package.module:function" for what can be imported, "path/to/file.py:function" for a file.

A reward may have functions beside it, which take (response, gold) too. They are named like the reward with "_form",
"_found" or "_key" behind ("math_form" for "math", "my_rewards.py:score_form" for "my_rewards.py:score"), and `beside`
finds them. The form function and the found function give 1.0 or 0.0, whether the answer is right or wrong: the first
says whether a response has the form in which the reward looks for an answer, the second whether the reward finds any
answer in it. The key function gives a text, the canonical form of the solution in the response: answers that differ in
form only have the same key. An empty text is no key.
"""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

from exgrpo.train.common.errors import RewardError, shown
from exgrpo.train.common.functions import load_function, load_place
from exgrpo.train.reward.contract import contract_of
from exgrpo.train.reward.grading import AUTO, FORMS, math_no_think_part, math_part

Reward = Callable[..., Any]
Key = Callable[[str, str], str]
Kind = Literal["form", "found", "key"]
"""Of a function beside a reward."""

BUILTIN = {"math": math_part, "math_no_think": math_no_think_part}
"""The functions of exgrpo.train.reward.grading that are rewards by their bare names, and what of a response decides."""
DEFAULT = "math_no_think"
"""The reward of questions whose source brings none."""


def reward_of(own: str, for_all: str | None) -> str:
    """The name of the reward that grades a question.

    Args:
        own: the reward that the question's source brings; "": none.
        for_all: `reward.function`, which is for all questions; None: not given.
    """
    return for_all or own or DEFAULT


def is_own(name: str) -> bool:
    """Whether a reward is the user's own: neither its module nor its file belongs to this package."""
    return not name.startswith("exgrpo.") and name not in BUILTIN


def resolve_reward(name: str) -> Reward:
    """The reward function called `name`.

    Raises RewardError for an unknown name (naming near ones), a file that is missing, a module or file that cannot be
    imported, a missing attribute, or one that cannot be called as exgrpo.train.reward.contract says.
    """
    function = load_function(_place(name), "reward", RewardError)
    contract_of(function, name)
    return function


def resolve_key(name: str) -> Key | None:
    """The key function beside the reward called `name`; None where it has none. Raises as `resolve_reward` does."""
    found = beside(name, "key")
    return None if found is None else cast(Key, resolve_reward(found))


def beside(name: str, kind: Kind) -> str | None:
    """The name of the function of this kind beside the reward called `name`, None when it has none.

    Raises RewardError for a module or file that cannot be loaded, as `resolve_reward` does.
    """
    found = f"{_place(name)}_{kind}"
    module = load_place(found, "reward", RewardError)
    return found if callable(getattr(module, found.rpartition(":")[2], None)) else None


def decisive_part_of(name: str, form: str = AUTO) -> Callable[[str], str | None]:
    """The function that takes from a response the part on which its grade depends; None: the grade is 0.

    Args:
        name: of the reward.
        form: a name in `grading.FORMS`: only the answer in this form counts; a reward of the user's own gets the
            whole response all the same.
    """
    part: Callable[[str], str | None] = BUILTIN.get(name, lambda response: response)
    if form == AUTO or is_own(name):
        return part

    def in_form(response: str) -> str | None:
        answer = FORMS[form].alone(response)
        return None if answer is None else part(answer)

    return in_form


def absolute(reward: str) -> str:
    """A reward's name with a file's path made absolute: the processes may have another working directory."""
    place, _, attribute = reward.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{attribute}" if place.endswith(".py") else reward


def _place(name: str) -> str:
    """The Python path of a reward."""
    if name in BUILTIN:
        return f"exgrpo.train.reward.grading:{name}"
    if not all(name.rpartition(":")[::2]):
        near = difflib.get_close_matches(name, BUILTIN, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise RewardError(
            f"unknown reward {shown(name)}{hint} Known: {', '.join(BUILTIN)}, 'package.module:function' and "
            "'path/to/file.py:function'"
        )
    return name
