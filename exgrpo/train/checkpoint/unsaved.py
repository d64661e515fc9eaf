"""Runs that ended before their first checkpoint: `--resume auto` begins them anew."""

import logging
from itertools import count
from pathlib import Path

from exgrpo.train.checkpoint.folder_lock import LOCK, claim
from exgrpo.train.checkpoint.listing import DELETED, FOLDER, UNFINISHED
from exgrpo.train.checkpoint.resume import FINISHED
from exgrpo.train.errors import ConfigError, os_errors_as

logger = logging.getLogger(__name__)


def is_unsaved(run: Path) -> bool:
    """Whether a folder is that of a run that has no checkpoint, not even a damaged one, and was not finished.

    Raises:
        ConfigError: it cannot be read.
    """
    with os_errors_as(ConfigError, f"{run} cannot be read"):
        if not run.is_dir() or (run / FINISHED).exists():
            return False
        saved = run / FOLDER
        if saved.is_dir() and any(not path.name.endswith((UNFINISHED, DELETED)) for path in saved.iterdir()):
            return False
        # A run that is killed as it makes its folder leaves it empty.
        return (run / "config.yaml").exists() or not any(run.iterdir())


def set_aside(run: Path) -> None:
    """Give another name to the folder of an unsaved run: what it holds may be of use to somebody.

    Raises:
        ConfigError: another process uses it, or it cannot be renamed.
    """
    with claim(run), os_errors_as(ConfigError, f"{run} cannot be renamed"):
        names = (run.with_name(f"{run.name}.unsaved{number}") for number in count(1))
        aside = next(name for name in names if not name.exists())
        run.rename(aside)
        (aside / LOCK).unlink()
    logger.warning("%s had no complete checkpoint: it is %s now, and a new run begins", run, aside.name)
