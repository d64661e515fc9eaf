"""Which run `--resume` means, and what may differ when it goes on."""

from pathlib import Path

from pydantic import BaseModel

from exgrpo.train.checkpoint import find
from exgrpo.train.config import Config, ConfigError

AUTO = "auto"
FINISHED = "finished"
"""File in the folder of a run that has nothing left to do, its last evaluation included."""
FREE = (
    "steps",
    "resume",
    "checkpoint.",
    "distributed.",
    "evaluation.",
    "output.",
    "reward.workers",
    "reward.time_limit",
    "rollout.servers",
    "rollout.sleep_level",
    "rollout.check_every",
)


def locate(config: Config) -> Path | None:
    """The folder of the run to continue; None where `auto` finds no unfinished one and a new run begins.

    Raises:
        ConfigError: a folder was named and has no complete checkpoint.
    """
    if config.resume is None:
        return None
    if config.resume != AUTO:
        folder = Path(config.resume)
        if not find(folder):
            raise ConfigError(f"resume: {folder} has no complete checkpoint to continue from")
        return folder
    root, name = config.output.folder, config.output.name
    candidates = [root / name] if name else sorted(root.glob("*/config.yaml"))
    unfinished = []
    for candidate in candidates:
        folder = candidate if name else candidate.parent
        if not (folder / FINISHED).exists() and (complete := find(folder)):
            unfinished.append((complete[0].folder.stat().st_mtime_ns, folder))
    return max(unfinished)[1] if unfinished else None


def check_continuation(config: Config, saved: Config) -> None:
    """Refuse changes that would make the rest of a run another run.

    Raises:
        ConfigError: naming the keys.
    """
    old, new = _flat(saved), _flat(config)
    changed = [key for key in new if new[key] != old[key] and not key.startswith(FREE)]
    if changed:
        raise ConfigError(
            f"resume: {', '.join(f'{key} was {old[key]!r} and is now {new[key]!r}' for key in changed)}; "
            "a run goes on as it began: leave these out, or start a new run"
        )


def _flat(model: BaseModel, prefix: str = "") -> dict[str, object]:
    values: dict[str, object] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            values |= _flat(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = value
    return values
