"""Environments by name: functions `(question, gold) -> reply`.

An environment begins an answer to a question, and may take columns of the question's row as keyword arguments behind a
*, as a reward does. `reply(turn) -> str | None` gets what the policy has written since the last reply, with the stop
string that ended it and without an EOS token, and says what comes behind it; None: nothing. With no reply the policy
goes on behind a stop string, and the answer is complete behind an EOS token. `needs(stop=(...))` of the function names
the strings at which the policy waits.

Every answer has a `reply` of its own, which may keep what it needs to know; those of several answers are called in
threads beside each other.
"""

import re
from collections.abc import Callable

from exgrpo.train.common.functions import needs
from exgrpo.train.data.expressions import parse

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
