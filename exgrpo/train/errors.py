"""The errors that a person can mend. A program prints one as a line; every other exception is a defect, a traceback."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

OTHER_RANKS_WAIT = 5.0
"""Seconds. The launcher looks after its processes once a second."""


class ExgrpoError(Exception):
    """The input is wrong or the machine refuses something; the message names it and says what to do."""


class ConfigError(ExgrpoError, ValueError):
    """A recipe, an option or the environment cannot be right; the message names the key and the remedy."""


class UnreadableRecipeError(ConfigError):
    """A recipe may not be read, which a person can mend: it is no damage."""


class DataError(ExgrpoError, ValueError):
    """Questions cannot be read or used; the message names the files and rows."""


class MissingDataError(DataError, FileNotFoundError):
    """There is no such file of questions."""


class ModelError(ExgrpoError, ValueError):
    """A model cannot be loaded or used; the message says why."""


class RewardError(ExgrpoError, ValueError):
    """A reward cannot be found or called; the message names it."""


class MissingRewardError(RewardError, FileNotFoundError):
    """There is no such file of rewards."""


class GraderError(ExgrpoError, RuntimeError):
    """The grading processes do not start."""


class RolloutError(ExgrpoError, RuntimeError):
    """The rollout engine cannot generate any more; the message says why and what to do."""


class WeightMismatchError(ExgrpoError, RuntimeError):
    """The rollout engine's log-probs are not the trainer's."""


class PreflightError(ExgrpoError, RuntimeError):
    """No answer of the preflight can earn a reward; the message says why and what to do."""


class CheckpointError(ExgrpoError, RuntimeError):
    """A checkpoint cannot be written or continued; the message says why and what to do."""


class OutputError(ExgrpoError, ValueError):
    """Results cannot be read or written; the message names the folder."""


class ReportError(ExgrpoError, ValueError):
    """A folder cannot be reported on, or a page cannot be written; the message names it."""


@contextmanager
def os_errors_as(kind: type[ExgrpoError], problem: str) -> Iterator[None]:
    """Turn an OSError of this block into an error of the family.

    Args:
        kind: class of the error.
        problem: what cannot be done; the system's reason follows it.

    Raises:
        ExgrpoError: of this kind.
    """
    try:
        yield
    except ExgrpoError:
        raise
    except OSError as error:
        raise kind(f"{problem}: {error.strerror or error}") from error


def is_first_rank() -> bool:
    """Whether this process is the one that speaks, as the launcher's environment says before the processes join."""
    return os.environ.get("RANK", "0") == "0"


def print_error(error: ExgrpoError) -> int:
    """Print an error as one line; returns the program's exit status.

    Other ranks than the first name themselves and wait before they print: where the first has the same error, the
    launcher has ended them by then, and the error is told once.
    """
    if is_first_rank():
        print(f"error: {error}", file=sys.stderr)
        return 2
    with suppress(KeyboardInterrupt):
        time.sleep(OTHER_RANKS_WAIT)
        print(f"error on rank {os.environ['RANK']}: {error}", file=sys.stderr)
    return 2
