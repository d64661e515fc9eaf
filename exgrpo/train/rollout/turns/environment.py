"""Environments by name: functions `(question, gold) -> reply`.

An environment is called once per answer. Like a reward, it may take columns of the question's row as keyword-only
arguments. `reply(turn) -> str | None` gets the text that the policy has written since the last reply, with the stop
string that ended it and without an EOS token. It returns the text to append, or None for no reply: then the policy
continues after a stop string, and an answer that ended with an EOS token is complete. The decorator
`needs(stop=(...))` names the strings at which the policy waits for a reply.

Each answer has its own `reply`, which may keep state; those of several answers are called in concurrent threads.
"""

import re
from collections.abc import Callable

from exgrpo.train.common.functions import needs
from exgrpo.train.data.expressions import parse

_EXPRESSION = re.compile(r"[-+*/()\s\d\u00d7\u00b7\u00f7\u2212]*$")


@needs(stop=("=",))
def calculator(question: str, gold: str) -> Callable[[str], str | None]:
    """Append the value after "expression =".

    Integers with + - * / and brackets; no reply to other text or to a value that is not an integer.
    """
    return _reply


def _reply(turn: str) -> str | None:
    before, sign, _ = turn.rpartition("=")
    found = _EXPRESSION.search(before) if sign else None
    expression = parse(found[0]) if found else None
    if expression is None or expression.value.denominator != 1:
        return None
    return (" " if turn.endswith(" =") else "") + str(expression.value)
