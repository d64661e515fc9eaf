"""Look-up of the five functions of a method of replay.

| kind | from | to |
|---|---|---|
| admit | a graded batch | a mask of the rows to store |
| prioritise | candidates, as columns | sampling weights |
| compose | the experience and fresh questions | the groups of a step |
| weigh | the replayed rows of a step | the terms of their tokens in the loss |
| expire | stored trajectories, as columns | a mask of those to forget |

A name is that of a function in the module `exgrpo.train.replay.KIND`, or the place of a user's function. `Needs` in
`exgrpo.train.common.functions` has what a function may declare.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from exgrpo.train.common.errors import ConfigError, MethodError, cause
from exgrpo.train.common.functions import Needs, needs
from exgrpo.train.common.step_batch import SCORES
from exgrpo.train.config.replay import KINDS, MethodKind
from exgrpo.train.replay.contract import CHECKS

ARGUMENTS = {
    "admit": ("batch", "options"),
    "prioritise": ("candidates", "options"),
    "compose": ("planner",),
    "settle": ("batch", "planner"),
    "weigh": ("batch", "options"),
    "expire": ("candidates", "options"),
}
"""Arguments of the functions of each kind."""


def names(kind: MethodKind) -> list[str]:
    """Names of the built-in functions of a kind."""
    return KINDS[kind].names


def find(kind: MethodKind, name: str) -> Callable[..., Any]:
    """Return the function of that kind and name; a user's own is checked in every call.

    Raises, when it is found:
        ConfigError: there is none, its module or file cannot be loaded, it declares what it cannot, or it takes other
            arguments.

    Raises, when a user's own is called:
        MethodError: it raises something, or gives something else than a function of its kind.
    """
    function = KINDS[kind].find(name)
    if name in names(kind):
        return function
    label = f"{KINDS[kind].option} {name}"
    found = _checked(kind, label, function)
    if settle := Needs.of(function).settle:
        Needs.of(settle).check(("scores",), f"{label}, settle")
        found = needs(settle=_checked("settle", f"{label}, settle", settle))(found)
    return found


def _checked(kind: str, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn each mistake of a function into one line that begins with the label."""
    _check_arguments(kind, label, function)
    file = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", None)

    @functools.wraps(function)
    def call(*given: Any) -> Any:
        try:
            result = function(*given)
        except Exception as error:
            if isinstance(error, MethodError):  # of a function that this one has called
                raise
            raise MethodError(f"{label}: {cause(error, file)}{_hint(error, kind)}") from error
        if wrong := CHECKS[kind](result, *given):
            raise MethodError(f"{label}: {wrong}")
        return result

    return call


def _check_arguments(kind: str, label: str, function: Callable[..., Any]) -> None:
    asked = ARGUMENTS[kind]
    try:
        takes = inspect.signature(function)
        takes.bind(*asked)
    except ValueError:  # of what is written in C
        return
    except TypeError:
        raise ConfigError(f"{label}: it takes {takes}, and it is called with ({', '.join(asked)})") from None


def _hint(error: Exception, kind: str) -> str:
    """Return a remedy for an exception of a user's function; empty if there is none to name."""
    if not isinstance(error, AttributeError) or not type(error.obj).__module__.startswith("exgrpo."):
        return ""
    if kind == "weigh" and error.name == "log_prob":
        return '; `log_prob` of the batch needs @needs(present="values")'
    if kind in ("admit", "settle") and error.name in SCORES:
        return f"; `{error.name}` of the batch needs @needs(scores=True)"
    kind_of = type(error.obj)
    there = [name for name in dir(error.obj) if name[0] != "_" and not callable(getattr(kind_of, name, None))]
    return f"; there are {', '.join(there)}"
