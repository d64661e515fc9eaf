"""What a run has come to and would go on from, bit for bit: the program's own loading, without a model."""

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from exgrpo.train.checkpoint.checkpoint import Checkpoints
from exgrpo.train.checkpoint.listing import MANIFEST, find
from exgrpo.train.checkpoint.resume import FINISHED
from exgrpo.train.common.durable import sha256
from exgrpo.train.main import configure
from exgrpo.train.metrics.log_files import SAMPLES
from exgrpo.train.replay import ReplayState
from exgrpo.train.run.model_folder import MODEL
from tests.torture.jobs import KEEP
from tests.train.fakes import LoneWorld
from tests.train.run.test_run import untimed

INDEX = ("segments", "segment", "row")
"""Where experience lies, which an interruption may change."""


class Loaded(NamedTuple):
    """What a run goes on from; two are equal if the rest of the run is. Files are by their SHA-256."""

    step: int
    policy: dict[str, str]
    trainer: str
    progress: dict[str, Any]


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
    return {str(path.relative_to(folder)): sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def load(run: Path, like: Path | None = None) -> Loaded:
    """Do what `--resume RUN` does before training.

    Args:
        run: its folder.
        like: the folder of a sound run with the same questions; None: it is sound itself.

    Raises:
        ExgrpoError: as `configure` and `Checkpoints.load` do.
    """
    configure([f"--resume={run}"])
    policy, trainer, lone = _Policy(), _Trainer(), cast(Any, LoneWorld())
    manifest = next(((like or run) / "checkpoints").glob(f"step_*/{MANIFEST}"))
    fingerprint = json.loads(manifest.read_bytes())["fingerprint"]
    checkpoints = Checkpoints(run, lone, fingerprint=fingerprint, config={}, keep=KEEP)
    step, progress = checkpoints.load(cast(Any, policy), cast(Any, trainer))
    return Loaded(step, policy.files, trainer.digest, progress)


def outcome(run: Path) -> dict[str, Any]:
    """What a finished run has come to, by the names of what is compared.

    Raises:
        ExgrpoError: its checkpoints cannot be loaded.
    """
    last = load(run)
    return {
        "finished": (run / FINISHED).exists(),
        "metrics": untimed(run),
        "samples": (run / SAMPLES).read_text(),
        # Older ones may be damaged or gone after damage, and a run that is killed before it deletes some keeps them.
        "newest checkpoint": find(run)[0].step,
        "weights and moments": last.policy,
        "trainer and experience": last.trainer,
        "evaluations": last.progress["evaluations"],
        "model": {name: digest for name, digest in digests(run / MODEL).items() if name.endswith(".safetensors")},
    }


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
