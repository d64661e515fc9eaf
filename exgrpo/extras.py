"""What some modules need beside torch."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType


class MissingExtraError(ImportError):
    """A package is missing, or it is not of a version that is needed; the message says what to install."""


@contextmanager
def needs(importer: str, *requirements: str) -> Iterator[None]:
    """Says what to install where an import of this block fails.

    Args:
        importer: ``__name__`` of the module that imports. A program, "__main__", ends with one line and exit status 2.
        requirements: arguments of pip install; an extra of this package is one: ``exgrpo[train]``.

    Raises:
        MissingExtraError: a package is missing, or it is not of a version that is needed.
    """
    try:
        yield
    except ImportError as error:
        told = isinstance(error, MissingExtraError)
        if not told and (error.name or "").partition(".")[0] == "exgrpo":
            raise
        problem = f"this needs packages beside torch ({error}): pip install {shlex.join(requirements)}"
        if told:  # by a module that this one imports
            problem = str(error).partition(": ")[2]
        if importer == "__main__":
            print(f"error: {problem}", file=sys.stderr)
            sys.exit(2)
        if told:
            raise
        raise MissingExtraError(f"{importer}: {problem}", name=error.name) from error


def imported_under(package: str, *requirements: str) -> None:
    """Has every module of a package imported as in a block of `needs`."""
    sys.meta_path.insert(0, _Finder(f"{package}.", requirements))


class _Finder(MetaPathFinder):
    def __init__(self, prefix: str, requirements: Sequence[str]) -> None:
        self.prefix, self.requirements = prefix, requirements

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that Python finds, with a loader that tells what is missing."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname.startswith(self.prefix) else None
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _CheckedLoader(spec.loader.name, spec.loader.path, self.requirements)
        return spec


class _CheckedLoader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, requirements: Sequence[str]) -> None:
        super().__init__(fullname, path)
        self.requirements = requirements

    def exec_module(self, module: ModuleType) -> None:
        """Import a module under `needs`."""
        with needs(self.name, *self.requirements):
            super().exec_module(module)
