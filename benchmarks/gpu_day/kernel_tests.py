"""The tests of the kernels that can be run with what is installed: `python -m benchmarks.gpu_day.kernel_tests`.

Files whose imports are missing are named and left out.
"""

import argparse
import ast
import importlib.machinery
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.programs import ROOT

TESTS = "tests/kernels"
OF_HOST = ("test_cpu_*", "test_cuda_[!b]*", "test_triton*_compile*", "test_launch_tuner.py", "test_extension.py")
"""Files that test no kernel on the device: they emulate it, or compile for several."""
WORKERS = min(8, (os.cpu_count() or 2) // 2)


def found(module: str, path: Sequence[str]) -> bool:
    """Whether a top-level module could be imported, without importing it."""
    name = module.partition(".")[0]
    if name in sys.builtin_module_names or name in sys.stdlib_module_names:
        return True
    return importlib.machinery.PathFinder.find_spec(name, list(path)) is not None


def missing_modules(file: Path, path: Sequence[str]) -> set[str]:
    """Modules that a file imports at its top, itself or through its neighbours, and that are not there."""
    missing: set[str] = set()
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Import):
            missing |= {alias.name for alias in statement.names if not found(alias.name, path)}
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            missing |= {name for name in [statement.module or ""] if not found(name, path)}
        elif isinstance(statement, ast.ImportFrom):
            names = [statement.module] if statement.module else [alias.name for alias in statement.names]
            neighbours = (file.with_name(f"{name}.py") for name in names)
            missing |= {name for one in neighbours if one.exists() for name in missing_modules(one, path)}
    return missing


def command(path: Sequence[str], folder: Path, quick: bool) -> list[str]:
    """What starts pytest; prints what is left out.

    Args:
        path: where modules are looked for.
        folder: for a configuration, where plugins are missing that the project's own one asks for.
        quick: whether one small file will do.
    """
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    words.append(f"{TESTS}/test_reference.py" if quick else TESTS)
    words += [f"--ignore-glob={TESTS}/{files}" for files in OF_HOST]
    for file in sorted((ROOT / TESTS).glob("test_*.py")):
        if missing := missing_modules(file, path):
            print(f"skipped: {file.relative_to(ROOT)} needs {', '.join(sorted(missing))}", flush=True)
            words.append(f"--ignore={file.relative_to(ROOT)}")
    if not found("pytest_timeout", path):
        print("skipped: time limits of single tests need pytest-timeout", flush=True)
        configuration = folder / "pytest.ini"
        configuration.write_text("[pytest]\nmarkers = gpu: needs a CUDA device\n", encoding="utf-8")
        words += ["-c", str(configuration), f"--rootdir={ROOT}"]
    if found("xdist", path) and not quick:
        words += ["-n", str(WORKERS)]
    return words


def main(argv: list[str]) -> int:
    """Run the program; returns pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small file alone")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(command(sys.path, Path(folder), options.quick), cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
