"""What some modules need beside torch."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(importer: str, *requirements: str) -> Iterator[None]:
    """Says what to install where an import of this block fails.

    Args:
        importer: ``__name__`` of the module that imports. A program, "__main__", ends with one line and exit status 2.
        requirements: arguments of pip install; an extra of this package is one: ``exgrpo[train]``.

    Raises:
        ImportError: a package is missing, or it is not of a version that is needed.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "exgrpo":
            raise
        problem = f"this needs packages beside torch ({error}): pip install {shlex.join(requirements)}"
        if importer == "__main__":
            print(f"error: {problem}", file=sys.stderr)
            sys.exit(2)
        raise ImportError(f"{importer}: {problem}", name=error.name) from error
