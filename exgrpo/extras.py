"""Import checks for optional packages: a missing one raises an error that names what to install."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType


class MissingExtraError(ImportError):
    """A required package is missing or has the wrong version; the message says what to install."""


@contextmanager
def needs(importer: str, *requirements: str) -> Iterator[None]:
    """Turn a failed import in this block into an error that says what to install.

    Args:
        importer: ``__name__`` of the importing module. "__main__" prints one line and exits with status 2.
        requirements: arguments of pip install, such as ``exgrpo[train]``.

    Raises:
        MissingExtraError: a package is missing or has the wrong version.
    """
    try:
        yield
    except ImportError as error:
        nested = isinstance(error, MissingExtraError)  # raised by a module that this one imports
        if not nested and (error.name or "").partition(".")[0] == "exgrpo":
            raise
        problem = f"this needs packages beside torch ({error}): pip install {shlex.join(requirements)}"
        if nested:
            problem = str(error).partition(": ")[2]
        if importer == "__main__":
            print(f"error: {problem}", file=sys.stderr)
            sys.exit(2)
        if nested:
            raise
        raise MissingExtraError(f"{importer}: {problem}", name=error.name) from error


def imported_under(package: str, *requirements: str) -> None:
    """Import every module of a package as if inside a `needs` block."""
    sys.meta_path.insert(0, _Finder(f"{package}.", requirements))


class _Finder(MetaPathFinder):
    def __init__(self, prefix: str, requirements: Sequence[str]) -> None:
        self.prefix, self.requirements = prefix, requirements

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname.startswith(self.prefix) else None
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _CheckedLoader(spec.loader.name, spec.loader.path, self.requirements)
        return spec


class _CheckedLoader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, requirements: Sequence[str]) -> None:
        super().__init__(fullname, path)
        self.requirements = requirements

    def exec_module(self, module: ModuleType) -> None:
        with needs(self.name, *self.requirements):
            super().exec_module(module)
