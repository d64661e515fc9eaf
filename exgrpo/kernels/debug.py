"""What calls are computed by: on request (EXGRPO_DEBUG=1), or where it is not what it should be."""

import os
import sys
from functools import cache

ENVIRONMENT = "EXGRPO_DEBUG"


def wanted() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get(ENVIRONMENT, "0") not in ("", "0")


@cache
def say(line: str) -> None:
    """Prints a line, the first time that it is said."""
    print(f"exgrpo: {line}", file=sys.stderr, flush=True)
