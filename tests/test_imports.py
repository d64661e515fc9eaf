"""The modules import each other in one direction, in functions and for types alone too."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def modules():
    """The files of the package by the names of their modules."""
    found = sorted((ROOT / "exgrpo").rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in found}


def imported(source, modules):
    """Those of some modules that a source imports anywhere; by their names, too, where it calls `import_module`."""
    late = "import_module(" in source
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                yield whole if whole in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif late and isinstance(node, ast.Constant) and node.value in modules:
            yield node.value
        elif late and isinstance(node, ast.JoinedStr):
            # A pattern of names, as in import_module(f"exgrpo.kernels.{name}_chunks"), begins with the package.
            parts = [re.escape(part.value) if isinstance(part, ast.Constant) else r"\w+" for part in node.values]
            package = min(modules).partition(".")[0]
            if parts and parts[0].startswith(rf"{package}\."):
                yield from filter(re.compile("".join(parts)).fullmatch, modules)


def circle(sources):
    """The modules of a circle in order, the first one again at its end; None where there is none."""
    graph = {name: set(imported(source, sources)) & set(sources) - {name} for name, source in sources.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_there_is_no_circle():
    assert circle({name: path.read_text(encoding="utf-8") for name, path in modules().items()}) is None


BACK = (
    "from p import a",
    "def f():\n    from p import a",
    "if TYPE_CHECKING:\n    from p.a import X",
    "import_module('p.a')",
    "import_module(f'p.{name}')",
)


@pytest.mark.parametrize("back", BACK)
def test_a_circle_is_found(back):
    forth = {"p.a": "from p import b", "p.b": "import p.c"}
    assert circle({**forth, "p.c": "import q.a"}) is None
    assert set(circle({**forth, "p.c": back})) >= {"p.a", "p.c"}
