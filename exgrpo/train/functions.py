"""Functions that a run takes by their name: those of a package that ships, and a user's own by their place.

A name is that of a module of the package, which has a function called as the package is; a function of one's own is
named by its place, "package.module:function" or "path/to/file.py:function".
"""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from pydantic import AfterValidator

from exgrpo.train.builtin import find_module
from exgrpo.train.errors import ConfigError
from exgrpo.train.mistakes import nearest
from exgrpo.train.python_path import load_function

F = TypeVar("F", bound=Callable[..., Any])


def needs(**what: Any) -> Callable[[F], F]:
    """Say what a function needs of a step, as attributes of the function; the modules of each kind say which exist."""

    def mark(function: F) -> F:
        vars(function).update(what)
        return function

    return mark


@dataclass(frozen=True)
class Functions:
    """The functions of one kind.

    Attributes:
        package: has their modules; its own name is that of the kind.
        option: which names one of them.
    """

    package: str
    option: str

    @property
    def kind(self) -> str:
        """What each of them is called in its module."""
        return self.package.rpartition(".")[2]

    @property
    def names(self) -> list[str]:
        """The names of those that ship; none of their modules is imported."""
        return sorted(module.name for module in pkgutil.iter_modules(import_module(self.package).__path__))

    @property
    def choices(self) -> str:
        """The names, for the help."""
        return f"{', '.join(self.names)}, or a function by its place."

    @property
    def checked(self) -> AfterValidator:
        """Checks the name in an option."""
        return AfterValidator(self.check)

    def check(self, name: str) -> str:
        """The name, if it can be one.

        Raises:
            ValueError: it is neither here nor a place.
        """
        if name in self.names or all(name.rpartition(":")[::2]):
            return name
        near = nearest(name, self.names)
        raise ValueError(
            f"unknown {self.kind} function {name!r}" + (f"; did you mean {near!r}?" if near else ";") + f" there are "
            f"{', '.join(self.names)}, and functions by their place, package.module:function or "
            "path/to/file.py:function"
        )

    def find(self, name: str) -> Callable[..., Any]:
        """The function of that name.

        Raises:
            ConfigError: there is none, or its module or file cannot be loaded.
        """
        if module := find_module(self.package, name, self.kind):
            return getattr(module, self.kind)
        try:
            self.check(name)
        except ValueError as error:
            raise ConfigError(f"{self.option}: {error}") from None
        return load_function(name, f"{self.kind} function", ConfigError)
