"""Functions that a run takes by their name: those of a module that ships, and a user's own by their place.

A name is that of a function of the module, whose own name is that of the kind; a function of one's own is named by its
place, "package.module:function" or "path/to/file.py:function".
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from pydantic import AfterValidator

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
        module: has them; its own name is that of the kind.
        option: which names one of them.
    """

    module: str
    option: str

    @property
    def kind(self) -> str:
        """What they are called together."""
        return self.module.rpartition(".")[2]

    @cached_property
    def names(self) -> list[str]:
        """The names of those that ship. Their module is read and not imported: it may import torch, and the options."""
        spec = find_spec(self.module)
        assert spec is not None
        assert spec.origin is not None
        defined = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
        names = (item.name for item in defined if isinstance(item, ast.FunctionDef))
        return sorted(name for name in names if not name.startswith("_"))

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
        if name in self.names:
            return getattr(import_module(self.module), name)
        try:
            self.check(name)
        except ValueError as error:
            raise ConfigError(f"{self.option}: {error}") from None
        return load_function(name, f"{self.kind} function", ConfigError)
