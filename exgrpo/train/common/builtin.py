"""What ships with the package and is found by its name, so that a new one needs no edit elsewhere.

A task NAME is the module exgrpo.train.data.NAME, which has a function `generate`; its model, tokenizer and recipe lie
in exgrpo/assets/NAME. A reward NAME is the module exgrpo.train.reward.builtin.NAME, which has a function `reward`.
"""

import pkgutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

PREFIX = "builtin:"
"""Begins the name of a task or a model where other sources may be named too."""
ASSETS = Path(__file__).parents[2] / "assets"
DEFAULT_TASK = "arithmetic"
"""The task of the default run."""


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
