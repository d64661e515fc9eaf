"""A calculator: behind "expression =", it writes the value."""

import re
from collections.abc import Callable

from exgrpo.train.data.expressions import parse
from exgrpo.train.functions import needs

_EXPRESSION = re.compile(r"[-+*/()\s\d\u00d7\u00b7\u00f7\u2212]*$")


@needs(stop=("=",))
def environment(question: str, gold: str) -> Callable[[str], str | None]:
    """Whole numbers with + - * / and brackets; there is no reply to what is no expression or has no whole value."""
    return _reply


def _reply(turn: str) -> str | None:
    """The value of the expression at the end of a turn."""
    before, sign, _ = turn.rpartition("=")
    found = _EXPRESSION.search(before) if sign else None
    expression = parse(found[0]) if found else None
    if expression is None or expression.value.denominator != 1:
        return None
    return (" " if turn.endswith(" =") else "") + str(expression.value)
