"""Functions of a user's own, by their place: "package.module:function" or "path/to/file.py:function"."""

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from exgrpo.train.errors import ExgrpoError, os_errors_as, shown


def load_function(name: str, kind: str, error: type[ExgrpoError], missing: type[ExgrpoError] | None = None) -> Any:
    """What stands at a Python path.

    Args:
        name: "package.module:function" for what can be imported, "path/to/file.py:function" for a file.
        kind: what it is to be, for messages.
        error: raised where the module or file cannot be loaded or lacks the attribute.
        missing: raised where there is no such file; None: `error`.
    """
    module = load_place(name, kind, error, missing)
    attribute = name.rpartition(":")[2]
    function = getattr(module, attribute, None)
    if function is None:
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise error(f"{kind} {name!r}: there is no {attribute!r} in it{hint}")
    if not callable(function):
        raise error(f"{kind} {name!r} is not callable: it is a {type(function).__name__}")
    return function


def load_place(name: str, kind: str, error: type[ExgrpoError], missing: type[ExgrpoError] | None = None) -> ModuleType:
    """The module or file of a Python path, loaded; raises as `load_function`."""
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return _load_file(place, name, kind, error, missing or error)
    try:
        return importlib.import_module(place)
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # a module's code may exit, too
        raise error(
            f"{kind} {name!r}: cannot import {place}: {type(problem).__name__}: {shown(problem)}. A module must be "
            "installed or on PYTHONPATH; a file can be named by its path, path/to/file.py:function"
        ) from problem


def _load_file(place: str, name: str, kind: str, error: type[ExgrpoError], missing: type[ExgrpoError]) -> ModuleType:
    path = Path(place).expanduser().resolve()
    with os_errors_as(error, f"{kind} {name!r}: {path} cannot be read"):
        is_file = path.is_file()
    if not is_file:
        raise missing(f"{kind} {name!r}: there is no file {path}")
    module_name = f"exgrpo_{kind}_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as problem:
        raise error(f"{kind} {name!r}: cannot run {path}: {type(problem).__name__}: {shown(problem)}") from problem
    return module
