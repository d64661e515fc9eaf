"""Which run `--resume` means, and what may differ when it goes on."""

import logging
import os
from pathlib import Path

from exgrpo.train.checkpoint.listing import FOLDER, find, folders, survey
from exgrpo.train.config import Config
from exgrpo.train.dotted import flat
from exgrpo.train.errors import ConfigError, UnreadableRecipeError, os_errors_as, shown
from exgrpo.train.recipe import load_recipe, validate

logger = logging.getLogger(__name__)

AUTO = "auto"
FINISHED = "finished"
"""File in the folder of a run that has nothing left to do, its last evaluation included."""
# What a run that goes on may have other values of; a key that ends with a dot is a whole section.
CHANGEABLE = (
    "steps",
    "resume",
    "preflight",
    "checkpoint.",
    "distributed.",
    "evaluation.",
    "output.",
    "lora.result",
    "reward.workers",
    "reward.time_limit",
    "reward.concurrency",
    "reward.max_failed",
    "rollout.servers",
    "rollout.sleep_level",
    "rollout.check_every",
)


def locate(config: Config) -> Path | None:
    """The folder of the run to continue; None where `auto` finds no unfinished one and a new run begins.

    Raises:
        ConfigError: it has no complete checkpoint; damaged ones are named.
    """
    if config.resume is None:
        return None
    with os_errors_as(ConfigError, "resume: the folders of runs cannot be read"):
        run = _newest_unfinished(config) if config.resume == AUTO else Path(config.resume)
    if run is None:
        return None
    with os_errors_as(ConfigError, f"resume: {run} cannot be read"):
        found, problems = survey(run)
    if not found:
        raise ConfigError(
            f"resume: {run} has no complete checkpoint to continue from" + "".join(f"; {p}" for p in problems)
        )
    return run


def _newest_unfinished(config: Config) -> Path | None:
    """Of the runs with a checkpoint, be it a damaged one: to begin anew beside that would hide what happened."""
    root, name = config.output.folder, config.output.name
    runs = [root / name] if name else [path.parent for path in sorted(root.glob(f"*/{FOLDER}"))]
    unfinished = []
    for run in runs:
        if not (run / FINISHED).exists() and (saved := folders(run)):
            unfinished.append((saved[0].stat().st_mtime_ns, run))
    return max(unfinished)[1] if unfinished else None


def finished(config: Config) -> Path | None:
    """The run that `auto` would go on with by its name, where that has nothing left to do.

    Raises:
        ConfigError: it was another run, or had fewer steps.
    """
    run = config.output.folder / (config.output.name or "")
    if config.resume != AUTO or not config.output.name or not (run / FINISHED).exists():
        return None
    saved = load_recipe(run / "config.yaml")
    check_continuation(config, saved)
    if config.steps > saved.steps:
        raise ConfigError(
            f"resume: {run} is finished after {saved.steps} steps: for more, --resume {run} --steps {config.steps}"
        )
    return run


def saved_config(run: Path) -> Config:
    """The configuration of a run with a complete checkpoint: config.yaml, held against the checkpoint's copy.

    Where config.yaml is lost or damaged, the copy is taken and a warning says so.

    Raises:
        ConfigError: config.yaml differs from the copy in what may not change, and the keys are named; or it may not be
            read.
    """
    newest, path = find(run)[0], run / "config.yaml"
    copy = validate(newest.manifest.config, f"the configuration in {newest.folder}")
    try:
        with os_errors_as(UnreadableRecipeError, f"{path} cannot be read"):
            if path.is_file() and not path.stat().st_size:
                raise ConfigError(f"{path} is empty")
        saved = load_recipe(path)
    except UnreadableRecipeError:
        raise
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            logger.warning("%s: the configuration is taken from %s", error, newest.folder)
        return copy
    if changed := _changes(saved, copy):
        raise ConfigError(
            f"{path} is not what the run was saved with: {changed}; "
            "put it right, or remove it: the checkpoint has a copy"
        )
    return saved


def check_continuation(config: Config, saved: Config) -> None:
    """Refuse changes that would make the rest of a run another run.

    Raises:
        ConfigError: naming the keys.
    """
    if changed := _changes(config, saved):
        raise ConfigError(f"resume: {changed}; a run goes on as it began: leave these out, or start a new run")


def _changes(config: Config, saved: Config) -> str:
    """What differs and may not, in words; empty where nothing does."""
    old, new = flat(saved), flat(config)
    changed = [key for key in new if new[key] != old[key] and not key.startswith(CHANGEABLE)]
    return ", ".join(f"{key} was {shown(old[key])} and is now {shown(new[key])}" for key in changed)
