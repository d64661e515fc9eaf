"""No line of the project runs what a file or another machine says: its source is searched for calls that would."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("exgrpo", "studies", "examples", "recipes", "benchmarks")

RUNS_CODE = {
    *(f"{module}.{name}" for module in ("pickle", "dill", "cloudpickle", "marshal", "joblib", "jsonpickle") for name in
      ("load", "loads", "decode", "Unpickler")),
    "shelve.open",
    "pandas.read_pickle",
    *(f"yaml.{kind}{name}" for kind in ("", "full_", "unsafe_") for name in ("load", "load_all")),
    "eval",
    "exec",
    "os.system",
    "os.popen",
}  # fmt: skip
OBJECTS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "recv_object_list"}
"""Of torch.distributed and accelerate, which pickle."""
NEEDED = {"torch.load": ("weights_only", True), "numpy.load": ("allow_pickle", False)}
"""An argument that has to be given."""
FIXED = {"trust_remote_code": False, "weights_only": True, "allow_pickle": False, "shell": False}
"""Arguments that have this value or none."""

ARGUED = {
    ("exgrpo/train/reward/worker.py", "pickle.loads"): "columns of a row, which the pool of the same run has pickled",
    ("exgrpo/train/common/distributed.py", "all_gather_object"): "ranks of one run, which run the same program",
    ("exgrpo/integrations/trl.py", "gather_object"): "ranks of one run, which run the same program",
}
"""What is called all the same, and where the bytes come from."""


def imported(tree: ast.AST) -> dict[str, str]:
    """What the names of a module stand for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {one.asname or one.name.partition(".")[0]: one.name if one.asname else one.name.partition(".")[0]
                      for one in node.names}  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return names


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """What a call calls."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    return f"{dotted(node.value, names)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def dangers(source: str) -> Iterator[str]:
    """What a module calls that could run what it reads."""
    tree = ast.parse(source)
    names = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "--trust-remote-code" in node.value:
            yield "--trust-remote-code"
        # A function that is handed on is called elsewhere.
        if isinstance(node, ast.Name | ast.Attribute) and (called := dotted(node, names)) in RUNS_CODE:
            yield called
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func, names)
        given = {one.arg: one.value for one in node.keywords}
        if called.rpartition(".")[2] in OBJECTS:
            yield called.rpartition(".")[2]
        argument, value = NEEDED.get(called, ("", None))
        if argument and not is_constant(given.get(argument), value):
            yield f"{called} without {argument}={value}"
        for argument, value in FIXED.items():
            if argument in given and not is_constant(given[argument], value):
                yield argument


def is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_the_source_calls_nothing_that_runs_what_it_reads():
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 200
    found = {(str(file.relative_to(ROOT)), danger) for file in files for danger in dangers(file.read_text("utf-8"))}
    assert found == set(ARGUED)
