"""What every program that may have several ranks does around its work."""

import logging
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack

from exgrpo.train.ending import Stopped, end_with_launcher, stop_on_signals
from exgrpo.train.errors import ExgrpoError, is_first_rank, print_error

INTERRUPTED = 130
"""Exit status of a program that a person or the system has stopped."""


def run_program(work: Callable[[ExitStack], None], stopped: str) -> int:
    """Do the work of a program; returns its exit status.

    Args:
        work: opens what it needs in the stack that it is given, which is closed afterwards.
        stopped: what a person who stops it is told, where the work does not say so by `Stopped`.
    """
    _quiet()
    stop_on_signals()
    end_with_launcher()
    try:
        with ExitStack() as resources:
            return _status(lambda: work(resources), stopped)
    except KeyboardInterrupt:  # while the resources are given back
        return INTERRUPTED


def _status(work: Callable[[], None], stopped: str) -> int:
    try:
        work()
    except ExgrpoError as error:
        return print_error(error)
    except KeyboardInterrupt as stop:
        if is_first_rank():
            print(stop if isinstance(stop, Stopped) else stopped, file=sys.stderr, flush=True)
        return INTERRUPTED
    return 0


def _quiet() -> None:
    """Leave the console to the display: libraries speak of what went wrong, not of how they start."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
    logging.getLogger("DeepSpeed").addFilter(lambda record: not record.getMessage().startswith("Setting accelerator"))
