"""Find the run to resume, check which options may change, and rename runs without a checkpoint."""

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
"""File in the folder of a run that is complete, its last evaluation included."""
SHOWN_CHANGES = 8
# Options that may change when a run is resumed; a key that ends with a dot is a whole section.
CHANGEABLE = (
    "steps",
    "resume",
    "preflight",
    "checkpoint.",
    "distributed.",
    "evaluation.",
    "experience.folder",  # temporary files; a cluster may name its local disk by the job
    "output.",
    "lora.result",
    "reward.workers",
    "reward.time_limit",
    "reward.concurrency",
    "reward.max_failed",
    "rollout.servers",
    *PLANNED,
    "rollout.check_every",
)


def locate(config: Config) -> Path | None:
    """Return the folder of the run to resume; None: start a new run, also if `auto` finds no unfinished one.

    Raises:
        ConfigError: it has no complete checkpoint; the message has the problems of damaged ones.
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
    """Return the unfinished run of that name; without a name, the newest one with that configuration.

    A run whose checkpoints are all damaged is returned, too: silently starting a new one would hide the damage.
    """
    for run in _unfinished(config):
        if config.output.name or not find(run) or not _changes(config, _copy(run)):
            return run
    return None


def _unfinished(config: Config) -> list[Path]:
    """Return the unfinished runs with a checkpoint, complete or damaged; newest first."""
    root, name = config.output.folder, config.output.name
    runs = [root / name] if name else [path.parent for path in sorted(root.glob(f"*/{FOLDER}"))]
    found = [(saved[0].stat().st_mtime_ns, run) for run in runs if (saved := folders(run))]
    return [run for _, run in sorted(found, reverse=True) if not (run / FINISHED).exists()]


def begun_anew(config: Config, folder: Path | str) -> str:
    """Return a sentence on why `auto` found no run to resume, with the differences to the nearest one."""
    root, name = config.output.folder, config.output.name
    others = [] if name else _unfinished(config)
    if not others:
        return f"no unfinished run{f' {name}' if name else ''} in {root}: a new one begins in {folder}"
    changes, run = min(((_changes(config, _copy(run)), run) for run in others), key=lambda found: len(found[0]))
    return (
        f"no unfinished run in {root} has this configuration: a new one begins in {folder}. The nearest is {run}, "
        f"where {_short(changes)}; to go on with that one: --resume {shlex.quote(str(run))}"
    )


def finished(config: Config) -> Path | None:
    """Return the folder of the run that `auto` would resume by name, if that run is finished.

    Raises:
        ConfigError: its configuration differs in what may not change, or it had fewer steps.
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
    """Return config.yaml of a run with a complete checkpoint, checked against the checkpoint's copy.

    If config.yaml is lost or damaged, returns the copy with a warning.

    Raises:
        ConfigError: config.yaml differs from the copy in options that may not change; the message names them.
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
            f"{path} is not what the run was saved with: {_short(differing)}; "
            "put it right, or remove it: the checkpoint has a copy"
        )
    return saved


def _copy(run: Path) -> Config:
    """Return the configuration in the newest complete checkpoint of a run."""
    newest = find(run)[0]
    return validate_stored(newest.manifest.config, f"the configuration in {newest.folder}")


def continued(config: Config, saved: Config) -> Config:
    """Return the configuration of a resumed run; the saved engine and memory plan replace values that are not set.

    Raises:
        ConfigError: options differ that may not change; the message names them.
    """
    if differing := _changes(config, saved):
        raise ConfigError(
            f"resume: {_short(differing)}; a run goes on as it began: leave these out, or start a new run"
        )
    rollout = config.rollout.model_copy(update={"engine": saved.rollout.engine})
    old, new = flat(saved), flat(config)
    planned = {key: old[key] for key in PLANNED if new[key] is None}
    return changed(config.model_copy(update={"rollout": rollout}), planned)


def _changes(config: Config, saved: Config) -> list[str]:
    """Describe the options that differ and may not change."""
    old, new = flat(saved), flat(config)
    if config.rollout.engine == "auto":  # a run saves the engine that auto selected
        new["rollout.engine"] = saved.rollout.engine
    differing = [key for key in new if new[key] != old[key] and not key.startswith(CHANGEABLE)]
    return [f"{key} was {shown(old[key])} and is now {shown(new[key])}" for key in differing]


def _short(changes: list[str]) -> str:
    more = f" and {len(changes) - SHOWN_CHANGES} more" if len(changes) > SHOWN_CHANGES else ""
    return ", ".join(changes[:SHOWN_CHANGES]) + more


def is_unsaved(run: Path) -> bool:
    """True if a folder is that of an unfinished run without any checkpoint, complete or damaged; raise ConfigError."""
    with os_errors_as(ConfigError, f"{run} cannot be read"):
        if not run.is_dir() or (run / FINISHED).exists():
            return False
        saved = run / FOLDER
        if saved.is_dir() and any(not path.name.endswith((UNFINISHED, DELETED)) for path in saved.iterdir()):
            return False
        # A run that is killed while it makes its folder leaves it empty.
        return (run / "config.yaml").exists() or not any(run.iterdir())


def set_aside(run: Path) -> None:
    """Rename the folder of a run without a checkpoint, to keep its files; raise ConfigError if it is in use."""
    with claim(run), os_errors_as(ConfigError, f"{run} cannot be renamed"):
        names = (run.with_name(f"{run.name}.unsaved{number}") for number in count(1))
        aside = next(name for name in names if not name.exists())
        run.rename(aside)
        (aside / LOCK).unlink()
    logger.warning("%s had no complete checkpoint: it is %s now, and a new run begins", run, aside.name)
