"""What a run would go on from, without a model: the program's own loading, with parts that keep what they are given."""

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from exgrpo.train.checkpoint.checkpoint import Checkpoints
from exgrpo.train.checkpoint.log_files import METRICS, SAMPLES
from exgrpo.train.distributed import World
from exgrpo.train.experience import ReplayState
from exgrpo.train.main import configure
from exgrpo.train.metrics.run_log import SAMPLES_SIZE
from exgrpo.train.policy.policy import Policy
from tests.torture.jobs import KEEP
from tests.train.fakes import LoneWorld

INDEX = ("segments", "segment", "row")
"""Where experience lies, which an interruption may change."""


@dataclass(frozen=True)
class Loaded:
    """What a run goes on from; two are equal if the rest of the run is.

    Attributes:
        step: the last one that is done.
        policy: SHA-256 of each file of the policy's states.
        trainer: SHA-256 of the trainer's state with its experience.
        progress: what the run knows of itself.
        logs: SHA-256 of each log up to this step.
    """

    step: int
    policy: dict[str, str]
    trainer: str
    progress: dict[str, Any]
    logs: dict[str, str]


class _Policy:
    """Keeps the checksums of the files that it would load."""

    def load_checkpoint(self, folder: Path) -> None:
        self.files = digests(folder)


class _Trainer:
    """Keeps the checksum of the state that it would go on from."""

    def restore(self, state: ReplayState) -> None:
        told = hashlib.sha256(json.dumps(state.values, sort_keys=True).encode())
        for name in sorted(state.arrays.keys() - set(INDEX)):
            _add(told, name, state.arrays[name])
        for trajectory in state.trajectories:
            for value in astuple(trajectory):
                _add(told, "", value)
        self.digest = told.hexdigest()


def _add(told: Any, name: str, value: object) -> None:
    if isinstance(value, np.ndarray):
        told.update(f"{name} {value.dtype} {value.shape} ".encode() + value.tobytes())
    else:
        told.update(f"{name} {value!r} ".encode())


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file in a folder, by its path there."""
    return {str(path.relative_to(folder)): _digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _digest(path: Path, size: int = -1) -> str:
    with path.open("rb") as file:
        return hashlib.sha256(file.read(size)).hexdigest()


def load(run: Path, fingerprint: str) -> Loaded:
    """Do what `--resume RUN` does before training.

    Raises:
        ExgrpoError: as `configure` and `Checkpoints.load` do.
    """
    configure([f"--resume={run}"])
    policy, trainer = _Policy(), _Trainer()
    lone = cast(World, LoneWorld())
    checkpoints = Checkpoints(run, lone, fingerprint=fingerprint, config={}, keep=KEEP)
    step, progress = checkpoints.load(cast(Policy, policy), cast(Any, trainer))
    logs = {
        name: _digest(run / name, progress["log"][key]) for name, key in ((METRICS, "metrics"), (SAMPLES, SAMPLES_SIZE))
    }
    return Loaded(step, policy.files, trainer.digest, progress, logs)


@contextmanager
def warnings() -> Iterator[list[str]]:
    """The messages of the package's loggers while this is open."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("exgrpo")
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
