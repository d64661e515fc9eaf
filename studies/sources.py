"""Source files of a user's own functions: a result is identified by their text, not by their names."""

import ast
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from exgrpo.train.common.errors import ConfigError, os_errors_as
from studies.origin import ROOT

OWN = ("exgrpo", "studies")
"""Packages covered by the commit of a result."""


def found_from(values: Any, folder: Path) -> Any:
    """Make the paths of functions (path/to/file.py:function) in options absolute, relative to a folder."""
    return _each_place(values, lambda file, function: f"{(folder / file.expanduser()).resolve()}:{function}")


def by_source(values: Any) -> Any:
    """Replace the paths of functions in options by a file's name and hash; raise ConfigError for a missing file."""
    return _each_place(values, lambda file, function: f"{file.name}:{function} of the source {hash_of(file)}")


def _each_place(values: Any, changed: Callable[[Path, str], str]) -> Any:
    if isinstance(values, dict):
        return {name: _each_place(value, changed) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_each_place(value, changed) for value in values]
    file, _, function = values.rpartition(":") if isinstance(values, str) else ("", "", "")
    return changed(Path(file), function) if file.endswith(".py") else values


def hash_of(place: Path) -> str:
    """Return a short hash of a file and of the modules in its folder that it imports, directly or not.

    A relative path of a recipe is relative to the project's folder, in which runs are started. Raise ConfigError if a
    file is missing or cannot be read.
    """
    first = ROOT / place.expanduser()
    texts: dict[Path, bytes] = {}
    left = [first]
    while left:
        path = left.pop()
        with os_errors_as(ConfigError, f"{place}: {path} cannot be read"):
            if path == first and not path.is_file():
                raise ConfigError(
                    f"{place}: there is no such file; a path in a study is absolute, or from the folder of its file"
                )
            texts[path] = path.read_bytes()
        left += set(_imported(path, first.parent, texts[path])) - texts.keys() - set(left)
    parts = [[str(path.relative_to(first.parent)), hashlib.sha256(texts[path]).hexdigest()] for path in sorted(texts)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _imported(path: Path, top: Path, text: bytes) -> Iterator[Path]:
    """Yield the files in the folder `top` and its packages that a module may import, without this project's own."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # the run reports the error
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(top, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[min(node.level, len(path.parents)) - 1] if node.level else top
            names = [(folder, f"{node.module or ''}.{alias.name}".strip(".")) for alias in node.names]
        else:
            continue
        for folder, name in names:
            parts = name.split(".")
            if parts[0] in OWN:
                continue
            for count in range(1, len(parts) + 1):
                module = folder.joinpath(*parts[:count])
                found = (module.with_suffix(".py"), module / "__init__.py")
                yield from (file for file in found if file.is_file() and file.is_relative_to(top))
