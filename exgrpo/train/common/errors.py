"""Errors that users can fix, printed as one line; any other exception is a bug and prints a traceback."""

import difflib
import os
import re
import reprlib
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OTHER_RANKS_WAIT = 5.0
"""Seconds; the launcher polls its processes once a second."""

SHOWN, LONGEST = 200, 4000
"""Largest number of characters of a value in a message, and of a whole message."""
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


class ExgrpoError(Exception):
    """Wrong input, or a refusal of the machine; the message names it and says what to do.

    Attributes:
        status: exit status of a program that ends with it.
    """

    status = 2


class ConfigError(ExgrpoError, ValueError):
    """A recipe, an option or the environment is invalid; the message names the key and the remedy."""


class MethodError(ConfigError):
    """A function of a method of replay is wrong; the message names it."""


class DataError(ExgrpoError, ValueError):
    """Questions cannot be read or used; the message names the files and rows."""


class ModelError(ExgrpoError, ValueError):
    """A model cannot be loaded or used; the message says why."""


class RewardError(ExgrpoError, ValueError):
    """A reward cannot be found or called; the message names it."""


class GraderError(ExgrpoError, RuntimeError):
    """The grading processes do not start."""


class RolloutError(ExgrpoError, RuntimeError):
    """The rollout engine cannot continue; the message says why and what to do."""


class LostProcessError(ExgrpoError, RuntimeError):
    """Another process of the run has ended or is unreachable; the message has the network's error."""


class WeightMismatchError(ExgrpoError, RuntimeError):
    """The rollout engine's log-probs are not the trainer's."""


class HaltError(ExgrpoError, RuntimeError):
    """A program stops because its work has become useless; the message says why and how to continue."""

    status = 1


class CheckpointError(ExgrpoError, RuntimeError):
    """A checkpoint cannot be written or continued; the message says why and what to do."""


class OutputError(ExgrpoError, ValueError):
    """Results cannot be read or written; the message names the folder."""


class ReportError(ExgrpoError, ValueError):
    """A folder cannot be reported on, or a page cannot be written; the message names it."""


def cut(text: str, characters: int) -> str:
    """Shorten a text to `characters` by removing its middle, so that a message keeps its remedy at the end."""
    if len(text) <= characters:
        return text
    gap = f" ... ({len(text)} characters) ... "
    head = (characters - len(gap)) * 2 // 3
    return text[:head] + gap + text[len(text) - (characters - len(gap) - head) :]


def shown(value: object, characters: int = SHOWN) -> str:
    """Format an external value for a message of one line: an exception as its text, anything else as a literal.

    Objects that cannot be printed are named by their type.
    """
    try:
        if isinstance(value, BaseException):
            return cut(" ".join(str(value).split()), characters)
        if isinstance(value, str):
            return cut(repr(value), characters)
        short = reprlib.Repr()
        short.maxstring = short.maxother = short.maxlong = 2 * characters
        return cut(short.repr(value), characters)
    except BaseException:  # a foreign object's repr may raise anything
        return f"<{type(value).__name__} that cannot be printed>"


def cause(error: BaseException, file: str | None) -> str:
    """Format an exception of a user's function, with the last line of their file that it passed through, if any."""
    message = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {shown(error)}"
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    return f"{message} ({Path(file).name}, line {lines[-1]})" if file and lines else message


def printable(text: str) -> str:
    r"""Escape what would move a terminal's cursor, change its colours or be invisible, as in \x1b."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


def system_reason(error: Exception) -> str | None:
    """Return the operating system's reason for an error, None if it is not a system error."""
    if isinstance(error, OSError):
        return error.strerror or shown(error)
    # Rust libraries, which write models and tokenizers, have their own exceptions.
    found = _SYSTEM_ERROR.search(shown(error, LONGEST))
    return os.strerror(int(found[1])) if found else None


@contextmanager
def os_errors_as(kind: type[ExgrpoError], problem: str, remedy: str = "") -> Iterator[None]:
    """Convert operating-system errors in this block to an ExgrpoError.

    Args:
        kind: class of the new error.
        problem: what failed; the system's reason is appended.
        remedy: what to do, appended last.

    Raises:
        ExgrpoError: of class `kind`.
    """
    try:
        yield
    except ExgrpoError:
        raise
    except Exception as error:
        reason = system_reason(error)
        if reason is None:
            raise
        raise kind(f"{problem}: {reason}" + (f". {remedy}" if remedy else "")) from error


def is_first_rank() -> bool:
    """Return True if this is rank 0 by the launcher's environment, before the processes join."""
    return os.environ.get("RANK", "0") == "0"


def print_error(error: ExgrpoError) -> int:
    """Print an error as one line and return the program's exit status.

    Other ranks than the first add their number and wait before they print: if the first has the same error, the
    launcher ends them meanwhile, and the error is printed once.
    """
    text = cut(printable(str(error)), LONGEST)
    if is_first_rank():
        print(f"error: {text}", file=sys.stderr)
        return error.status
    with suppress(KeyboardInterrupt):
        time.sleep(OTHER_RANKS_WAIT)
        print(f"error on rank {os.environ['RANK']}: {text}", file=sys.stderr)
    return error.status


def nearest(key: str, known: Iterable[str]) -> str | None:
    """Return the most similar known key, None without one; a key that only lacks its section is preferred."""
    keys = list(known)
    inner = [one for one in keys if one.endswith(f".{key}")]
    return next(iter(inner or difflib.get_close_matches(key, keys, n=1, cutoff=0.5)), None)
