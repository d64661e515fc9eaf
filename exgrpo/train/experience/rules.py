"""The five functions that make a method of replay, by name.

| kind | from | to |
|---|---|---|
| admit | a graded group | the answers of it that are stored |
| prioritise | what can be drawn, as columns | weights |
| compose | a batch, and draws by these weights | the groups of a step |
| weigh | the replayed answers of a step | the terms of their tokens in the loss |
| expire | what is stored, as columns | what is forgotten |

A name is that of a module of `exgrpo.train.experience.KIND`, which has a function KIND; a function of one's own is
named by its place, "package.module:function" or "path/to/file.py:function". What a function needs of a step, it says
itself: see `needs`.
"""

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal, TypeVar

from exgrpo.train.builtin import find_module
from exgrpo.train.errors import ConfigError
from exgrpo.train.mistakes import nearest
from exgrpo.train.python_path import load_function

Kind = Literal["admit", "prioritise", "compose", "weigh", "expire"]
PACKAGE = "exgrpo.train.experience"
F = TypeVar("F", bound=Callable[..., Any])


def needs(**what: Any) -> Callable[[F], F]:
    """Say what a function needs of a step, as attributes of the function; the modules of each kind say which exist."""

    def mark(function: F) -> F:
        vars(function).update(what)
        return function

    return mark


def names(kind: Kind) -> list[str]:
    """The names of the functions of a kind that are here; none of their modules is imported."""
    return sorted(module.name for module in pkgutil.iter_modules(import_module(f"{PACKAGE}.{kind}").__path__))


def check_name(kind: Kind, name: str) -> str:
    """The name, if it can be one.

    Raises:
        ValueError: it is neither here nor a place.
    """
    known = names(kind)
    if name in known or all(name.rpartition(":")[::2]):
        return name
    near = nearest(name, known)
    raise ValueError(
        f"unknown {kind} function {name!r}" + (f"; did you mean {near!r}?" if near else ";") + f" there are "
        f"{', '.join(known)}, and functions by their place, package.module:function or path/to/file.py:function"
    )


def find(kind: Kind, name: str) -> Callable[..., Any]:
    """The function of that kind and name.

    Raises:
        ConfigError: there is none, or its module or file cannot be loaded.
    """
    if module := find_module(f"{PACKAGE}.{kind}", name, kind):
        return getattr(module, kind)
    try:
        check_name(kind, name)
    except ValueError as error:
        raise ConfigError(f"experience.{kind}: {error}") from None
    return load_function(name, f"{kind} function", ConfigError)
