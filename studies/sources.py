"""The text of a user's own functions, which says what they do; their names do not."""

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exgrpo.train.errors import ConfigError, os_errors_as
from studies.origin import ROOT

OWN = ("exgrpo", "studies")
"""What a result names the commit of."""


def files_in(values: Any) -> list[str]:
    """The files among options whose functions they name, as path/to/file.py:function."""
    if isinstance(values, str):
        place = values.rpartition(":")[0]
        return [place] if place.endswith(".py") else []
    inner = values.values() if isinstance(values, dict) else values if isinstance(values, list) else ()
    return sorted({place for value in inner for place in files_in(value)})


def hash_of(place: str) -> str:
    """A short hash of a file and of the modules beside it that it imports, and that these import.

    Args:
        place: its path; where it is relative, to the folder of the project, in which runs are started.

    Raises:
        ConfigError: it is missing or cannot be read.
    """
    first = ROOT / Path(place).expanduser()
    texts: dict[Path, bytes] = {}
    left = [first]
    while left:
        path = left.pop()
        with os_errors_as(ConfigError, f"{place}: {path} cannot be read"):
            if path == first and not path.is_file():
                raise ConfigError(f"{place}: there is no file {path}; a path in a study is absolute, or from {ROOT}")
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
