"""Environments by name: functions `(question, gold) -> reply`.

An environment begins an answer to a question, and may take columns of the question's row as keyword arguments behind a
*, as a reward does. `reply(turn) -> str | None` gets what the policy has written since the last reply, with the stop
string that ended it and without an EOS token, and says what comes behind it; None: nothing. With no reply the policy
goes on behind a stop string, and the answer is complete behind an EOS token. `needs(stop=(...))` of the function names
the strings at which the policy waits.

Every answer has a `reply` of its own, which may keep what it needs to know; those of several answers are called in
threads beside each other.

The options of answers of several turns stand at the end.
"""

import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from exgrpo.train.data.expressions import parse
from exgrpo.train.functions import Functions, needs
from exgrpo.train.section import Section, StopString

ENVIRONMENTS = Functions("exgrpo.train.turns.environment", "environment.function")
MOST_TURNS = 1000

_EXPRESSION = re.compile(r"[-+*/()\s\d\u00d7\u00b7\u00f7\u2212]*$")


@needs(stop=("=",))
def calculator(question: str, gold: str) -> Callable[[str], str | None]:
    """Writes the value behind "expression =".

    Whole numbers with + - * / and brackets; there is no reply to what is no expression or has no whole value.
    """
    return _reply


def _reply(turn: str) -> str | None:
    """The value of the expression at the end of a turn."""
    before, sign, _ = turn.rpartition("=")
    found = _EXPRESSION.search(before) if sign else None
    expression = parse(found[0]) if found else None
    if expression is None or expression.value.denominator != 1:
        return None
    return (" " if turn.endswith(" =") else "") + str(expression.value)


class EnvironmentConfig(Section):
    """What replies to the policy within an answer: tools, games, users (docs/environments.md)."""

    function: Annotated[str, ENVIRONMENTS.checked] | None = Field(
        None, description=f"What replies: {ENVIRONMENTS.choices} None: nothing does."
    )
    stop: tuple[StopString, ...] | None = Field(
        None,
        description="Strings at which the policy waits for a reply, besides the EOS token; None: the function's.",
    )
    role: Literal["user", "tool"] | None = Field(
        None, description="Replies are messages of this role in the chat template; None: they are text as it is."
    )
    turns: int = Field(8, ge=2, le=MOST_TURNS, description="Turns of the policy in an answer, at most.")
    time_limit: float = Field(
        10.0, gt=0, le=3600, description="Seconds for a reply, at most an hour; then the answer ends unfinished."
    )
