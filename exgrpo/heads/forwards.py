"""Replacing the forward of one module, and giving it back."""

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
    """A function of a module with the module, as the module's forward.

    Unlike a bound method it can be pickled within the module, and it shows the signature of the module's class, which
    generate() and trainers look at.
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
        """What accelerate wraps and binds again."""
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
    """How to undo the replacement of a forward. A module that holds its own one may be copied deeply and pickled.

    Attributes:
        attribute: what the instance had as its forward; None: nothing, a method of the class was called.
        installed: what is called now.
    """

    attribute: Forward | None
    installed: _Bound

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward as it was."""
        if self.attribute is not None:
            return self.attribute(*args, **kwargs)
        module = self.installed.module
        return type(module).forward(module, *args, **kwargs)

    def is_outermost(self, module: nn.Module) -> bool:
        """Whether nothing else has replaced the module's forward since."""
        return module.forward is self.installed

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
            with the copy. One of a Python module, if it is to be pickled.
    """
    replacement = Replacement(vars(module).get("forward"), _Bound(function, module))
    module.forward = replacement.installed
    return replacement


@contextmanager
def replaced_forward(module: nn.Module, function: Forward) -> Iterator[None]:
    """The module's forward calls ``function(module, ...)`` within the context."""
    replacement = replace_forward(module, function)
    try:
        yield
    finally:
        replacement.undo(module)
