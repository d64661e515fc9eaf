"""The runs that are tortured, and what one has come to and would go on from, bit for bit."""

import hashlib
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from exgrpo.train.checkpoint.checkpoint import Checkpoints
from exgrpo.train.checkpoint.listing import MANIFEST, find, folders
from exgrpo.train.checkpoint.resume import FINISHED
from exgrpo.train.common.durable import sha256
from exgrpo.train.main import configure
from exgrpo.train.metrics.log_files import SAMPLES
from exgrpo.train.replay import ReplayState
from exgrpo.train.replay.stored import OF_TRAJECTORY
from exgrpo.train.run.model_folder import MODEL
from tests.train.fakes import LoneWorld
from tests.train.launch import MAIN, Ranks, completed
from tests.train.run.test_run import untimed

STEPS, KEEP = 6, 3
OPTIONS = (
    *(f"--steps={STEPS}", "--questions=4", "--rollout.samples=4", "--rollout.engine=transformers"),
    *("--data.train_limit=40", "--data.test_limit=8", "--experience.start_pass_rate=0", "--evaluation.every=3"),
    *("--checkpoint.every=1", f"--checkpoint.keep={KEEP}", "--preflight=off"),
)
"""A checkpoint in each step, so that every run saves often and deletes often."""
INDEX = ("segments", "segment", "row")
"""Where experience lies, which an interruption may change."""


@dataclass(frozen=True)
class Kind:
    """What a run computes, and on how many processes; its name is that of its files."""

    name: str
    options: tuple[str, ...]
    ranks: int

    def start(self, run: Path, *arguments: str) -> Ranks:
        """Start a run in its folder, or go on with it."""
        return Ranks(MAIN, *self.arguments(run), *arguments, ranks=self.ranks)

    def arguments(self, run: Path) -> tuple[str, ...]:
        """Of the training program."""
        return (*OPTIONS, *self.options, f"--output.name={run.name}", f"--output.folder={run.parent}")


METHODS = {
    "plain": (),
    "adapters": ("--lora.rank=4",),
    "calculator": ("--environment.function=calculator",),
}
KINDS = tuple(Kind(f"{name}-{ranks}", options, ranks) for name, options in METHODS.items() for ranks in (1, 2))


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
        stored, told = state.trajectories, hashlib.sha256(json.dumps(state.values, sort_keys=True).encode())
        arrays = [state.arrays[name] for name in sorted(state.arrays.keys() - set(INDEX))]
        arrays += [stored.columns[name] for name in OF_TRAJECTORY]
        for array in (*arrays, *stored.tokens(np.arange(len(stored)))[:3]):
            told.update(f"{array.dtype} {array.shape} ".encode() + array.tobytes())
        self.digest = told.hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file in a folder, by its path there."""
    return {str(path.relative_to(folder)): sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def load(run: Path, like: Path | None = None) -> Loaded:
    """Do what `--resume RUN` does before training, without a model.

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


def load_step(run: Path, step: int, work: Path) -> Loaded:
    """What a sound run goes on from where the checkpoint of a step is its newest; `work` is for a copy."""
    shutil.copytree(run, work)
    for folder in folders(work):
        if int(folder.name[-8:]) > step:
            shutil.rmtree(folder)
    loaded = load(work)
    shutil.rmtree(work)
    return loaded


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


class References:
    """Uninterrupted runs of each kind, made when they are asked for; those that are there already are taken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, kind: Kind) -> Path:
        """The folder of the run of a kind."""
        run = self.folder / kind.name
        if not (run / FINISHED).exists() or not run.with_suffix(".seconds").exists():
            shutil.rmtree(run, ignore_errors=True)
            begun = time.monotonic()
            completed(MAIN, *kind.arguments(run), ranks=kind.ranks)
            run.with_suffix(".seconds").write_text(str(time.monotonic() - begun))
        return run

    def seconds(self, kind: Kind) -> float:
        """What the run of a kind took."""
        return float(self.of(kind).with_suffix(".seconds").read_text())
