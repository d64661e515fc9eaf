"""The errors that a person can mend. A program prints one as a line; every other exception is a defect, a traceback."""

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
"""Seconds. The launcher looks after its processes once a second."""

SHOWN, LONGEST = 200, 4000
"""Characters of a value in a message, and of a whole message."""
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


class ExgrpoError(Exception):
    """The input is wrong or the machine refuses something; the message names it and says what to do.

    Attributes:
        status: the exit status of a program that ends by it.
    """

    status = 2


class ConfigError(ExgrpoError, ValueError):
    """A recipe, an option or the environment cannot be right; the message names the key and the remedy."""


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
    """The rollout engine cannot generate any more; the message says why and what to do."""


class LostProcessError(ExgrpoError, RuntimeError):
    """Another process of the run has ended or is not reached; the message has the cause that the network gives."""


class WeightMismatchError(ExgrpoError, RuntimeError):
    """The rollout engine's log-probs are not the trainer's."""


class HaltError(ExgrpoError, RuntimeError):
    """A program stops because what it does is worth nothing; the message says why and how to go on."""

    status = 1


class CheckpointError(ExgrpoError, RuntimeError):
    """A checkpoint cannot be written or continued; the message says why and what to do."""


class OutputError(ExgrpoError, ValueError):
    """Results cannot be read or written; the message names the folder."""


class ReportError(ExgrpoError, ValueError):
    """A folder cannot be reported on, or a page cannot be written; the message names it."""


def cut(text: str, characters: int) -> str:
    """A text of at most so many characters: a longer one loses its middle, and a message so keeps its remedy."""
    if len(text) <= characters:
        return text
    gap = f" ... ({len(text)} characters) ... "
    head = (characters - len(gap)) * 2 // 3
    return text[:head] + gap + text[len(text) - (characters - len(gap) - head) :]


def shown(value: object, characters: int = SHOWN) -> str:
    """What a message shows of a value that comes from outside: of an exception its text, of all else the literal.

    Args:
        value: anything; what cannot be printed is named by its type.
        characters: at most so many are shown, on one line.
    """
    try:
        if isinstance(value, BaseException):
            return cut(" ".join(str(value).split()), characters)
        if isinstance(value, str):
            return cut(repr(value), characters)
        short = reprlib.Repr()
        short.maxstring = short.maxother = short.maxlong = 2 * characters
        return cut(short.repr(value), characters)
    except BaseException:  # what prints a foreign object may do anything
        return f"<{type(value).__name__} that cannot be printed>"


def cause(error: BaseException, file: str | None) -> str:
    """What a user's function raised, with the line of their file where there is one."""
    return f"{type(error).__name__}: {shown(error)}{place_in(file, error)}"


def place_in(file: str | None, error: BaseException) -> str:
    """The line of a file at which an exception went through it last, in brackets; empty where it did not."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    return f" ({Path(file).name}, line {lines[-1]})" if file and lines else ""


def printable(text: str) -> str:
    r"""A text for a terminal: what would move its cursor, change its colours or show nothing is written as \x1b."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


def system_reason(error: Exception) -> str | None:
    """Why the system refused what a program asked of it; None: the error is none of the system."""
    if isinstance(error, OSError):
        return error.strerror or shown(error)
    # Libraries in Rust, which write models and tokenizers, have exceptions of their own.
    found = _SYSTEM_ERROR.search(shown(error, LONGEST))
    return os.strerror(int(found[1])) if found else None


@contextmanager
def os_errors_as(kind: type[ExgrpoError], problem: str, remedy: str = "") -> Iterator[None]:
    """Turn an error of the system in this block into an error of the family.

    Args:
        kind: class of the error.
        problem: what cannot be done; the system's reason follows it.
        remedy: what to do, behind that.

    Raises:
        ExgrpoError: of this kind.
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
    """Whether this process is the one that speaks, as the launcher's environment says before the processes join."""
    return os.environ.get("RANK", "0") == "0"


def print_error(error: ExgrpoError) -> int:
    """Print an error as one line; returns the program's exit status.

    Other ranks than the first name themselves and wait before they print: where the first has the same error, the
    launcher has ended them by then, and the error is told once.
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
    """The known key that was probably meant; one that only lacks its section comes before those of other words."""
    keys = list(known)
    inner = [one for one in keys if one.endswith(f".{key}")]
    return next(iter(inner or difflib.get_close_matches(key, keys, n=1, cutoff=0.5)), None)
