"""The five functions that make a method of replay, by name.

| kind | from | to |
|---|---|---|
| admit | a graded group | the answers of it that are stored |
| prioritise | what can be drawn, as columns | weights |
| compose | a batch, and draws by these weights | the groups of a step |
| weigh | the replayed answers of a step | the terms of their tokens in the loss |
| expire | what is stored, as columns | what is forgotten |

A name is that of a function of the module `exgrpo.train.experience.KIND`, or the place of a function of one's own; see
`exgrpo.train.functions`. What a function needs of a step, it says itself: see `needs`.
"""

from collections.abc import Callable
from typing import Any, Literal

from exgrpo.train.functions import Functions
from exgrpo.train.functions import needs as needs

Kind = Literal["admit", "prioritise", "compose", "weigh", "expire"]
PACKAGE = "exgrpo.train.experience"
KINDS: dict[Kind, Functions] = {
    "admit": Functions(f"{PACKAGE}.admit", "experience.admit"),
    "prioritise": Functions(f"{PACKAGE}.prioritise", "experience.prioritise"),
    "compose": Functions(f"{PACKAGE}.compose", "experience.compose"),
    "weigh": Functions(f"{PACKAGE}.weigh", "objective.weigh"),
    "expire": Functions(f"{PACKAGE}.expire", "experience.expire"),
}


def names(kind: Kind) -> list[str]:
    """The names of the functions of a kind that are here."""
    return KINDS[kind].names


def find(kind: Kind, name: str) -> Callable[..., Any]:
    """The function of that kind and name.

    Raises:
        ConfigError: there is none, or its module or file cannot be loaded.
    """
    return KINDS[kind].find(name)
