"""Replacing the forward of one module, and giving it back."""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

Forward = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Replacement:
    """How to undo the replacement of a forward. A module that holds its own one may be copied deeply.

    Attributes:
        own: the forward as it was, bound to the module.
        attribute: what the instance had as its forward; None: nothing, ``own`` is a method of the class.
        function: what is called now, with the module as its first argument.
    """

    own: Forward
    attribute: Forward | None
    function: Forward

    def is_outermost(self, module: nn.Module) -> bool:
        """Whether nothing else has replaced the module's forward since."""
        return getattr(module.forward, "__func__", None) is self.function

    def undo(self, module: nn.Module) -> None:
        """Gives the module the forward that it had."""
        del module.forward
        if self.attribute is not None:
            module.forward = self.attribute


def replace_forward(module: nn.Module, function: Forward) -> Replacement:
    """Makes the module's forward call ``function(module, ...)``.

    Args:
        module: any module; hooks stay and run as before.
        function: a function of a module, not a closure over this one, so that a deep copy of the module calls it
            with the copy.
    """
    replacement = Replacement(module.forward, vars(module).get("forward"), function)
    module.forward = types.MethodType(function, module)
    return replacement


@contextmanager
def replaced_forward(module: nn.Module, function: Forward) -> Iterator[None]:
    """The module's forward calls ``function(module, ...)`` within the context."""
    replacement = replace_forward(module, function)
    try:
        yield
    finally:
        replacement.undo(module)


def with_signature(function: Forward, of: Forward) -> Forward:
    """A function that calls ``function`` and shows the signature of another: generate() and trainers look at it."""

    @functools.wraps(of)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return forward
