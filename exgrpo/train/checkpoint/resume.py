"""Which run `--resume` means, and what may differ when it goes on; one that ended before its first checkpoint."""

import logging
import shlex
from itertools import count
from pathlib import Path

from exgrpo.train.checkpoint.listing import DELETED, FOLDER, UNFINISHED, find, folders, survey
from exgrpo.train.common.durable import LOCK, claim
from exgrpo.train.common.errors import ConfigError, is_first_rank, os_errors_as, shown
from exgrpo.train.config.options import PLANNED, Config
from exgrpo.train.config.recipe import changed, load_stored, validate_stored
from exgrpo.train.config.section import flat

logger = logging.getLogger(__name__)

AUTO = "auto"
FINISHED = "finished"
"""File in the folder of a run that has nothing left to do, its last evaluation included."""
SHOWN_CHANGES = 8
# What a run that goes on may have other values of; a key that ends with a dot is a whole section.
CHANGEABLE = (
    "steps",
    "resume",
    "preflight",
    "checkpoint.",
    "distributed.",
    "evaluation.",
    "experience.folder",  # its files go with the processes, and a cluster may name its disk by the job
    "output.",
    "lora.result",
    "reward.workers",
    "reward.time_limit",
    "reward.concurrency",
    "reward.max_failed",
    "rollout.servers",
    *PLANNED,
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
        run = _meant(config) if config.resume == AUTO else Path(config.resume)
        if run is None:
            return None
        if not run.is_dir():
            raise ConfigError(f"resume: there is no folder {run}")
        found, problems = survey(run)
    if not found:
        raise ConfigError("; ".join([f"resume: {run} has no complete checkpoint to continue from", *problems]))
    return run


def _meant(config: Config) -> Path | None:
    """The run of that name; without one, the newest unfinished run of that configuration.

    A run without a sound checkpoint passes for it: to begin anew beside that would hide what happened.
    """
    for run in _unfinished(config):
        if config.output.name or not find(run) or not _changes(config, _copy(run)):
            return run
    return None


def _unfinished(config: Config) -> list[Path]:
    """The runs with a checkpoint, be it a damaged one, that are not finished; the newest one first."""
    root, name = config.output.folder, config.output.name
    runs = [root / name] if name else [path.parent for path in sorted(root.glob(f"*/{FOLDER}"))]
    found = [(saved[0].stat().st_mtime_ns, run) for run in runs if (saved := folders(run))]
    return [run for _, run in sorted(found, reverse=True) if not (run / FINISHED).exists()]


def begun_anew(config: Config, folder: Path | str) -> str:
    """Why `auto` has found no run to go on with, in one sentence; and what differs in the nearest one, if there is any.

    Args:
        config: what is asked for.
        folder: of the run that begins.
    """
    root, name = config.output.folder, config.output.name
    others = [] if name else _unfinished(config)
    if not others:
        return f"no unfinished run{f' {name}' if name else ''} in {root}: a new one begins in {folder}"
    changes, run = min(((_changes(config, _copy(run)), run) for run in others), key=lambda found: len(found[0]))
    return (
        f"no unfinished run in {root} has this configuration: a new one begins in {folder}. The nearest is {run}, "
        f"where {_told(changes)}; to go on with that one: --resume {shlex.quote(str(run))}"
    )


def finished(config: Config) -> Path | None:
    """The run that `auto` would go on with by its name, where that has nothing left to do.

    Raises:
        ConfigError: it was another run, or had fewer steps.
    """
    run = config.output.folder / (config.output.name or "")
    if config.resume != AUTO or not config.output.name or not (run / FINISHED).exists():
        return None
    saved = load_stored(run / "config.yaml")
    continued(config, saved)
    if config.steps > saved.steps:
        raise ConfigError(
            f"resume: {run} is finished after {saved.steps} steps: for more, "
            f"--resume {shlex.quote(str(run))} --steps {config.steps}"
        )
    return run


def saved_config(run: Path) -> Config:
    """The configuration of a run with a complete checkpoint: config.yaml, held against the checkpoint's copy.

    Where config.yaml is lost or damaged, the copy is taken and a warning says so.

    Raises:
        ConfigError: config.yaml differs from the copy in what may not change, and the keys are named.
    """
    copy, path = _copy(run), run / "config.yaml"
    try:
        if path.is_file() and not path.stat().st_size:
            raise ConfigError(f"{path} is empty")
        saved = load_stored(path)
    except ConfigError as error:
        if is_first_rank():
            logger.warning("%s: the configuration is taken from %s", error, find(run)[0].folder)
        return copy
    if differing := _changes(saved, copy):
        raise ConfigError(
            f"{path} is not what the run was saved with: {_told(differing)}; "
            "put it right, or remove it: the checkpoint has a copy"
        )
    return saved


def _copy(run: Path) -> Config:
    """The configuration in the newest complete checkpoint of a run."""
    newest = find(run)[0]
    return validate_stored(newest.manifest.config, f"the configuration in {newest.folder}")


def continued(config: Config, saved: Config) -> Config:
    """What a run goes on with, which has the engine and the plan of memory that it began with where none is named.

    Raises:
        ConfigError: it would be another run; the keys are named.
    """
    if differing := _changes(config, saved):
        raise ConfigError(f"resume: {_told(differing)}; a run goes on as it began: leave these out, or start a new run")
    rollout = config.rollout.model_copy(update={"engine": saved.rollout.engine})
    old, new = flat(saved), flat(config)
    planned = {key: old[key] for key in PLANNED if new[key] is None}
    return changed(config.model_copy(update={"rollout": rollout}), planned)


def _changes(config: Config, saved: Config) -> list[str]:
    """What differs and may not, in words."""
    old, new = flat(saved), flat(config)
    if config.rollout.engine == "auto":  # a run saves the engine that this has meant
        new["rollout.engine"] = saved.rollout.engine
    differing = [key for key in new if new[key] != old[key] and not key.startswith(CHANGEABLE)]
    return [f"{key} was {shown(old[key])} and is now {shown(new[key])}" for key in differing]


def _told(changes: list[str]) -> str:
    more = f" and {len(changes) - SHOWN_CHANGES} more" if len(changes) > SHOWN_CHANGES else ""
    return ", ".join(changes[:SHOWN_CHANGES]) + more


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
