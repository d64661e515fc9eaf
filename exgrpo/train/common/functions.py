"""What a run takes by its name: tasks, rewards and models that ship, and functions, a user's own by their place.

A new task needs no edit elsewhere: a task NAME is the module exgrpo.train.data.tasks.NAME, which has a function
`generate`; its model, tokenizer and recipe lie in exgrpo/assets/NAME.

A name is that of a function of the module, whose own name is that of the kind; a function of one's own is named by its
place, "package.module:function" or "path/to/file.py:function". Grading processes import this module, and not pydantic.
"""

import ast
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from exgrpo.train.common.errors import ConfigError, ExgrpoError, nearest, os_errors_as, shown

if TYPE_CHECKING:
    from pydantic import AfterValidator

PREFIX = "builtin:"
"""Begins the name of a task or a model where other sources may be named too."""
ASSETS = Path(__file__).parents[2] / "assets"
DEFAULT_TASK = "arithmetic"
"""The task of the default run."""
F = TypeVar("F", bound=Callable[..., Any])


def find_module(package: str, name: str, function: str) -> ModuleType | None:
    """The module of this name in a package; None where there is none, or it lacks the function."""
    if not name.isidentifier() or find_spec(f"{package}.{name}") is None:
        return None
    module = import_module(f"{package}.{name}")
    return module if callable(getattr(module, function, None)) else None


def module_names(package: str, function: str) -> list[str]:
    """The names that `find_module` knows."""
    names = sorted(module.name for module in pkgutil.iter_modules(import_module(package).__path__))
    return [name for name in names if find_module(package, name, function)]


def model_names() -> list[str]:
    """The names of the models in `ASSETS`."""
    return sorted(config.parent.name for config in ASSETS.glob("*/config.json"))


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
        # The spec of a module is found by an import of the packages above it, so that of the uppermost one has to do.
        package, *below = self.module.split(".")
        spec = find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        file = Path(spec.submodule_search_locations[0]).joinpath(*below).with_suffix(".py")
        defined = ast.parse(file.read_text(encoding="utf-8")).body
        names = (item.name for item in defined if isinstance(item, ast.FunctionDef))
        return sorted(name for name in names if not name.startswith("_"))

    @property
    def choices(self) -> str:
        """The names, for the help."""
        return f"{', '.join(self.names)}, or a function by its place."

    @property
    def checked(self) -> "AfterValidator":
        """Checks the name in an option."""
        from pydantic import AfterValidator

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


def load_function(name: str, kind: str, error: type[ExgrpoError]) -> Any:
    """What stands at a Python path.

    Args:
        name: "package.module:function" for what can be imported, "path/to/file.py:function" for a file.
        kind: what it is to be, for messages.
        error: raised where the module or file cannot be loaded or lacks the attribute.
    """
    module = load_place(name, kind, error)
    attribute = name.rpartition(":")[2]
    function = getattr(module, attribute, None)
    if function is None:
        near = nearest(attribute, dir(module))
        hint = f"; did you mean {near!r}?" if near else ""
        raise error(f"{kind} {name!r}: there is no {attribute!r} in it{hint}")
    if not callable(function):
        raise error(f"{kind} {name!r} is not callable: it is a {type(function).__name__}")
    return function


def load_place(name: str, kind: str, error: type[ExgrpoError]) -> ModuleType:
    """The module or file of a Python path, loaded; raises as `load_function`."""
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return _load_file(place, name, kind, error)
    try:
        return import_module(place)
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # a module's code may exit, too
        raise error(
            f"{kind} {name!r}: cannot import {place}: {type(problem).__name__}: {shown(problem)}. A module must be "
            "installed or on PYTHONPATH; a file can be named by its path, path/to/file.py:function"
        ) from problem


def _load_file(place: str, name: str, kind: str, error: type[ExgrpoError]) -> ModuleType:
    path = Path(os.path.expanduser(place)).resolve()
    with os_errors_as(error, f"{kind} {name!r}: {path} cannot be read"):
        is_file = path.is_file()
    if not is_file:
        raise error(f"{kind} {name!r}: there is no file {path}")
    module_name = f"exgrpo_{kind}_{path.stem}"
    spec = spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as problem:
        raise error(f"{kind} {name!r}: cannot run {path}: {type(problem).__name__}: {shown(problem)}") from problem
    return module
