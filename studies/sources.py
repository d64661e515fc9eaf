"""The text of a user's own functions, which says what they do; their names do not."""

import ast
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from exgrpo.train.common.errors import ConfigError, os_errors_as
from studies.origin import ROOT

OWN = ("exgrpo", "studies")
"""What a result names the commit of."""


def found_from(values: Any, folder: Path) -> Any:
    """Options whose functions, as path/to/file.py:function, have absolute paths; theirs are from a folder."""
    return _each_place(values, lambda file, function: f"{(folder / file.expanduser()).resolve()}:{function}")


def by_source(values: Any) -> Any:
    """Options with the name and a hash of a file, in the place of its path.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """
    return _each_place(values, lambda file, function: f"{file.name}:{function} of the source {hash_of(file)}")


def _each_place(values: Any, changed: Callable[[Path, str], str]) -> Any:
    if isinstance(values, dict):
        return {name: _each_place(value, changed) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_each_place(value, changed) for value in values]
    file, _, function = values.rpartition(":") if isinstance(values, str) else ("", "", "")
    return changed(Path(file), function) if file.endswith(".py") else values


def hash_of(place: Path) -> str:
    """A short hash of a file and of the modules beside it that it imports, and that these import.

    Args:
        place: its path; one of a recipe may be relative, to the folder of the project, in which runs are started.

    Raises:
        ConfigError: it is missing or cannot be read.
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
        left += set(_beside(path, first.parent, texts[path])) - texts.keys() - set(left)
    parts = [[str(path.relative_to(first.parent)), hashlib.sha256(texts[path]).hexdigest()] for path in sorted(texts)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _beside(path: Path, top: Path, text: bytes) -> Iterator[Path]:
    """The files in a folder, `top`, and its packages that a module in it may import, without this project's own."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # the run says what is wrong with it
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
