"""Find tasks, rewards and models by name, and user functions by their place.

A new task needs no edit elsewhere: a task NAME is the module exgrpo.train.data.tasks.NAME with a function `generate`;
its model, tokenizer and recipe are in exgrpo/assets/NAME.

A built-in function is named by its name in the module of its kind, a user's function by its place,
"package.module:function" or "path/to/file.py:function". Grading processes import this module, but not pydantic.
"""

import ast
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from exgrpo.train.common.errors import ConfigError, ExgrpoError, cause, nearest, os_errors_as, shown

if TYPE_CHECKING:
    from pydantic import AfterValidator

PREFIX = "builtin:"
"""Prefix of a built-in task or model where other sources may be named too."""
PACKAGE = Path(__file__).parents[2]
ASSETS = PACKAGE / "assets"
DEFAULT_TASK = "arithmetic"
"""Task of the default run."""
F = TypeVar("F", bound=Callable[..., Any])
Distinct = Literal["response", "key"]
Term = Literal["shaped", "ratio", "clipped"]
Present = Literal["values", "reference"]
CHOICES = {"distinct": (None, *get_args(Distinct)), "term": get_args(Term), "present": (None, *get_args(Present))}
"""Values of the fields of `Needs`; all others but `settle` and `stop` are true or false."""


def find_module(package: str, name: str, function: str) -> ModuleType | None:
    """Return the module of this name in a package; None if it does not exist or lacks the function."""
    if not name.isidentifier() or find_spec(f"{package}.{name}") is None:
        return None
    module = import_module(f"{package}.{name}")
    return module if callable(getattr(module, function, None)) else None


def module_names(package: str, function: str) -> list[str]:
    """Return the names that `find_module` finds."""
    names = sorted(module.name for module in pkgutil.iter_modules(import_module(package).__path__))
    return [name for name in names if find_module(package, name, function)]


def model_names() -> list[str]:
    """Return the names of the models in `ASSETS`."""
    return sorted(config.parent.name for config in ASSETS.glob("*/config.json"))


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Declaration of a function by `needs`; the kind of the function decides which fields count.

    Attributes:
        distinct: admit: store only the newest of equal responses to a question; "key": of equal solutions, too.
        scores: admit, settle: it reads the scores of fresh rows, which are then computed for all of them.
        drift: prioritise, expire: it reads `drift` or `headroom` of stored answers, which are then renewed wherever one
            is scored; without it they stay as they were written.
        settle: compose: a function that selects what is trained on after grading.
        alone: compose: it trains on single stored answers, which have no advantage in a group of their own.
        fills: compose: stored groups take the places of groups without a gradient, as `rollout.refills` would.
        in_place: compose: stored answers take the places of fresh ones in groups of K.
        keeps_groups: compose: all planned groups are trained on, each of K answers.
        term: weigh: the objective of replayed tokens.
        present: weigh: it gets the log-probs of the policy before the update; "reference": only to pass them on.
        fused: surrogate: it is the objective of `exgrpo.kernels.linear_policy_loss`.
        bounds_weights: surrogate: clipped tokens have a gradient.
        all_rows: surrogate: it gets rows without an advantage, too, and weights apart from the advantages.
        coupled: surrogate: it compares the answers of a group.
        stop: environment: strings at which the policy waits for a reply.

    Raises:
        ConfigError: a value is not one of those that are possible.
    """

    distinct: Distinct | None = None
    scores: bool = False
    drift: bool = False
    settle: Callable[..., Any] | None = None
    alone: bool = False
    fills: bool = False
    in_place: bool = False
    keeps_groups: bool = False
    term: Term = "shaped"
    present: Present | None = None
    fused: bool = False
    bounds_weights: bool = False
    all_rows: bool = False
    coupled: bool = False
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            known = (False, True) if one.default is False else CHOICES.get(one.name)
            if known and value not in known:
                raise ConfigError(f"@needs: {one.name} is one of {', '.join(map(repr, known))}, and not {shown(value)}")
        if not (self.settle is None or callable(self.settle)):
            raise ConfigError(f"@needs: settle is a function, and not {shown(self.settle)}")
        if not (isinstance(self.stop, tuple) and all(isinstance(one, str) and one for one in self.stop)):
            raise ConfigError(f"@needs: stop is a tuple of strings, and not {shown(self.stop)}")

    @classmethod
    def of(cls, function: object) -> "Needs":
        """Return what a function declares; the defaults without a declaration."""
        return getattr(function, "__needs__", cls())

    def check(self, known: Sequence[str], label: str) -> None:
        """Raise ConfigError, which begins with the label, for a field that has no meaning for such a function."""
        for one in fields(self):
            if one.name not in known and getattr(self, one.name) != one.default:
                there = f"there are {', '.join(known)}" if known else "there is nothing to declare"
                raise ConfigError(f"{label}: @needs({one.name}=...) has no meaning for this kind of function: {there}")


def needs(**what: Any) -> Callable[[F], F]:
    """Declare what a function needs of a step, by the fields of `Needs`.

    Raises:
        ConfigError: there is no such field, or a value is not possible.
    """
    known = [one.name for one in fields(Needs)]
    for name in what:
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"@needs: unknown name {name!r}; {hint}")

    def mark(function: F) -> F:
        vars(function)["__needs__"] = replace(Needs.of(function), **what)
        return function

    return mark


@dataclass(frozen=True)
class Functions:
    """Functions of one kind.

    Attributes:
        module: module of the built-in ones, named after the kind.
        option: option that names one of them.
        needs: fields of `Needs` that they may declare.
    """

    module: str
    option: str
    needs: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Name of the kind."""
        return self.module.rpartition(".")[2]

    @cached_property
    def names(self) -> list[str]:
        """Names of the built-in functions. The module is parsed, not imported: it may import torch, and the options."""
        file = PACKAGE.joinpath(*self.module.split(".")[1:]).with_suffix(".py")
        defined = ast.parse(file.read_text(encoding="utf-8")).body
        names = (item.name for item in defined if isinstance(item, ast.FunctionDef))
        return sorted(name for name in names if not name.startswith("_"))

    @property
    def choices(self) -> str:
        """Names for the help."""
        return f"{', '.join(self.names)}, or a function by its place."

    @property
    def checked(self) -> "AfterValidator":
        """Validator of the option's value."""
        from pydantic import AfterValidator

        return AfterValidator(self.check)

    def check(self, name: str) -> str:
        """Return the name; raise ValueError if it is neither a built-in name nor a place."""
        if name in self.names or all(name.rpartition(":")[::2]):
            return name
        near = nearest(name, self.names)
        raise ValueError(
            f"unknown {self.kind} function {name!r}" + (f"; did you mean {near!r}?" if near else ";") + f" there are "
            f"{', '.join(self.names)}, and functions by their place, package.module:function or "
            "path/to/file.py:function"
        )

    def find(self, name: str) -> Callable[..., Any]:
        """Return the function of that name; raise ConfigError if there is none, or it cannot be loaded."""
        if name in self.names:
            return getattr(import_module(self.module), name)
        try:
            self.check(name)
        except ValueError as error:
            raise ConfigError(f"{self.option}: {error}") from None
        function = load_function(name, f"{self.kind} function", ConfigError)
        Needs.of(function).check(self.needs, f"{self.option} {name}")
        return function


def load_function(name: str, kind: str, error: type[ExgrpoError]) -> Any:
    """Return the function at a Python path.

    Args:
        name: "package.module:function" for an importable module, "path/to/file.py:function" for a file.
        kind: its kind, for messages.
        error: class of the error if the module or file cannot be loaded or lacks the attribute.
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
    """Load the module or file of a Python path; raises as `load_function`."""
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return _load_file(place, name, kind, error)
    try:
        return import_module(place)
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # a module's code may exit, too
        raise error(
            f"{kind} {name!r}: cannot import {place}: {cause(problem, None)}. A module must be "
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
        raise error(f"{kind} {name!r}: cannot run {path}: {cause(problem, str(path))}") from problem
    return module
