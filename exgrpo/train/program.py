"""The training program: the command line and all cheap checks first, then what takes seconds to import."""

import logging
import os
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path

from exgrpo.train.checkpoint.resume import check_continuation, locate, saved_config
from exgrpo.train.config import Config
from exgrpo.train.early import look
from exgrpo.train.ending import Stopped, end_with_launcher, stop_on_signals
from exgrpo.train.errors import ExgrpoError, is_first_rank, print_error
from exgrpo.train.recipe import parse_args

INTERRUPTED = 130
"""Exit status of a program that a person or the system has stopped."""


def main(argv: list[str]) -> int:
    """Run the program; returns its exit status."""
    _quiet()
    stop_on_signals()
    end_with_launcher()
    try:
        with ExitStack() as resources:
            return _train(argv, resources)
    except KeyboardInterrupt:  # while the resources are given back
        return INTERRUPTED


def _train(argv: list[str], resources: ExitStack) -> int:
    folder = None
    try:
        config, folder = configure(argv)
        early = look(config, resources, resumed=folder is not None)
        from exgrpo.train.run import run  # torch, transformers and DeepSpeed: only for what can be right

        run(config, early, resources, folder)
    except ExgrpoError as error:
        return print_error(error)
    except KeyboardInterrupt as stop:
        _tell(stop, folder)
        return INTERRUPTED
    return 0


def configure(argv: list[str]) -> tuple[Config, Path | None]:
    """The configuration, and the folder of the run that goes on with it (None: a new one)."""
    config = parse_args(argv)
    folder = locate(config)
    if folder is not None:
        saved = saved_config(folder)
        config = parse_args(argv, saved)
        check_continuation(config, saved)
    return config, folder


def _quiet() -> None:
    """Leave the console to the display: libraries speak of what went wrong, not of how they start."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
    logging.getLogger("DeepSpeed").addFilter(lambda record: not record.getMessage().startswith("Setting accelerator"))


def _tell(stop: KeyboardInterrupt, folder: Path | None) -> None:
    """One line, by one process."""
    if not is_first_rank():
        return
    before = "stopped before the first step" + (f"; --resume {folder} goes on where it was" if folder else "")
    print(str(stop) if isinstance(stop, Stopped) else before, file=sys.stderr, flush=True)
