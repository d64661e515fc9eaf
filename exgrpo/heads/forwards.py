"""Reversible replacement of a module's forward."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

Forward = Callable[..., Any]


class _Bound:
    """A function bound to a module as the module's forward.

    Unlike a bound method it can be pickled within the module, and it has the signature of the module's class, which
    generate() and trainers inspect.
    """

    def __init__(self, function: Forward, module: nn.Module) -> None:
        self.function, self.module = function, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.module, *args, **kwargs)

    @property
    def __self__(self) -> nn.Module:
        return self.module

    @property
    def __func__(self) -> Forward:
        """The unbound function, which accelerate wraps and binds again."""
        function = self.function

        @functools.wraps(type(self.module).forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return forward

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(types.MethodType(self.__func__, self.module))


@dataclass(frozen=True, eq=False)
class Replacement:
    """Undo record of a replaced forward. A module that holds its own one may be copied deeply and pickled.

    Attributes:
        attribute: forward in the instance's attributes before; None: it used the class's method.
        installed: the current forward.
    """

    attribute: Forward | None
    installed: _Bound

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original forward."""
        if self.attribute is not None:
            return self.attribute(*args, **kwargs)
        module = self.installed.module
        return type(module).forward(module, *args, **kwargs)

    def is_outermost(self, module: nn.Module) -> bool:
        """True if the module's forward has not been replaced again."""
        return module.forward is self.installed

    def undo(self, module: nn.Module) -> None:
        """Restore the original forward."""
        del module.forward
        if self.attribute is not None:
            module.forward = self.attribute


def replace_forward(module: nn.Module, function: Forward) -> Replacement:
    """Make the module's forward call ``function(module, ...)``.

    Args:
        module: any module; its hooks run as before.
        function: takes the module as its first argument, so that a deep copy calls it with the copy; do not close over
            the module. For pickling it must be defined at module level.
    """
    replacement = Replacement(vars(module).get("forward"), _Bound(function, module))
    module.forward = replacement.installed
    return replacement


@contextmanager
def replaced_forward(module: nn.Module, function: Forward) -> Iterator[None]:
    """Make the module's forward call ``function(module, ...)`` within the context."""
    replacement = replace_forward(module, function)
    try:
        yield
    finally:
        replacement.undo(module)
