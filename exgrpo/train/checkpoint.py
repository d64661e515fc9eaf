"""Checkpoints that survive a kill at any moment.

    RUN/checkpoints/step_00000020/     one checkpoint; it exists under this name only when it is complete
        manifest.json                  step, world size, data fingerprint, files with sizes, results so far, generators
        zero/                          DeepSpeed's shards of weights and optimiser
    RUN/experience/                    buffer segments and state arrays, each named by its checksum

Everything is written and flushed to disk under another name first; renaming the folder is the last act.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exgrpo.train.distributed import World
from exgrpo.train.experience_store import DamagedFileError, ExperienceStore, read_checked, segment_names, write_checked
from exgrpo.train.policy import Policy
from exgrpo.train.trainer import Trainer, TrainerState

FOLDER, EXPERIENCE, MANIFEST, ZERO = "checkpoints", "experience", "manifest.json", "zero"
UNFINISHED = ".unfinished"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or continued; the message says why and what to do."""


@dataclass(frozen=True)
class Found:
    """A complete checkpoint and what its manifest says."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """The last training step that is in it."""
        return int(self.manifest["step"])


def find(run: Path) -> list[Found]:
    """The complete checkpoints of a run, newest first. A folder with missing or short files is not complete."""
    found = []
    for folder in sorted((run / FOLDER).glob("step_*"), reverse=True):
        if folder.suffix == UNFINISHED:
            continue
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        sizes = manifest["files"].items()
        if all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes):
            found.append(Found(folder, manifest))
    return found


class Checkpoints:
    """Writes and reads the checkpoints of a run.

    Args:
        run: the run's folder.
        world: its processes; all of them must call every method.
        fingerprint: of the training questions: another data set cannot be continued on.
        keep: how many checkpoints stay; older ones are deleted after a newer one is complete.
    """

    def __init__(self, run: Path, world: World, *, fingerprint: str, keep: int) -> None:
        self.run = run
        self.world = world
        self.fingerprint = fingerprint
        self.keep = keep
        self.store = ExperienceStore(run / EXPERIENCE)

    def save(self, step: int, policy: Policy, trainer: Trainer, progress: dict[str, Any]) -> None:
        """Write the checkpoint of a step.

        Args:
            step: the last finished training step.
            policy: its weights, optimiser and schedule are saved.
            trainer: its state is saved.
            progress: plain values of the caller, returned by `load`.

        Raises:
            CheckpointError: it could not be written; the checkpoints before it are intact.
        """
        final = self.run / FOLDER / f"step_{step:08d}"
        work = final.with_suffix(UNFINISHED)
        self._on_main(lambda: self._clear(work, policy.checkpoint_bytes), step)
        try:
            policy.engine.save_checkpoint(str(work), tag=ZERO, save_latest=False)
        except (OSError, RuntimeError) as error:
            # The other ranks wait for this one inside DeepSpeed: its end lets the launcher end them.
            free = shutil.disk_usage(self.run).free
            raise self._failure(step, f"{str(error).splitlines()[0]} ({free / 1e9:.2f} GB are free)") from error
        self._on_every(lambda: _flush_own(work, self.world), step)
        self._on_main(lambda: self._finish(final, work, step, trainer.state(), progress), step)

    def _clear(self, work: Path, needed: int) -> None:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        free = shutil.disk_usage(work).free
        if needed > free:
            raise OSError(f"it needs {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free")

    def _finish(self, final: Path, work: Path, step: int, state: TrainerState, progress: dict[str, Any]) -> None:
        index = self.store.save(state.trajectories)
        manifest = {
            "step": step,
            "world_size": self.world.size,
            "fingerprint": self.fingerprint,
            "files": {str(p.relative_to(work)): p.stat().st_size for p in sorted(work.rglob("*")) if p.is_file()},
            "arrays": write_checked(self.store.folder, {**state.arrays, **index}),
            "segments": segment_names(index),
            "values": state.values,
            "progress": progress,
        }
        _write_flushed(work / MANIFEST, json.dumps(manifest))
        _flush_folder(work)
        shutil.rmtree(final, ignore_errors=True)
        work.replace(final)
        _flush_folder(final.parent)
        self._rotate()

    def _rotate(self) -> None:
        complete = find(self.run)
        for old in complete[self.keep :]:
            shutil.rmtree(old.folder)
        kept = complete[: self.keep]
        self.store.remove_unused({name for c in kept for name in (c.manifest["arrays"], *c.manifest["segments"])})

    def load(self, policy: Policy, trainer: Trainer) -> tuple[int, dict[str, Any]]:
        """Continue from the newest checkpoint whose files are sound.

        Returns:
            its step and the caller's values.

        Raises:
            CheckpointError: there is none, or it belongs to other data or another number of processes.
        """
        problems = []
        for found in find(self.run):
            self._check(found)
            try:
                arrays = read_checked(self.store.folder, found.manifest["arrays"])
                trajectories = self.store.load(arrays)
            except DamagedFileError as error:
                problems.append(str(error))
                continue
            policy.engine.load_checkpoint(str(found.folder), tag=ZERO)
            trainer.restore(TrainerState(found.manifest["values"], arrays, trajectories))
            return found.step, found.manifest["progress"]
        raise CheckpointError(
            f"{self.run} has no sound checkpoint to continue from" + "".join(f"; {p}" for p in problems)
        )

    def _check(self, found: Found) -> None:
        manifest = found.manifest
        if manifest["world_size"] != self.world.size:
            raise CheckpointError(
                f"{found.folder} was written by {manifest['world_size']} processes and this is {self.world.size}: "
                f"continue with --num_accelerators {manifest['world_size']}"
            )
        if manifest["fingerprint"] != self.fingerprint:
            raise CheckpointError(f"{found.folder} belongs to other training questions than the configuration names")

    def _on_main(self, action: Callable[[], None], step: int) -> None:
        self._on_every(action if self.world.is_main else lambda: None, step)

    def _on_every(self, action: Callable[[], None], step: int) -> None:
        """Run an action; where it fails on any rank, fail on all with the same message."""
        problem = ""
        try:
            action()
        except OSError as error:
            problem = error.strerror or str(error)
        problems = [p for p in self.world.gather(problem) if p]
        if problems:
            raise self._failure(step, problems[0])

    def _failure(self, step: int, problem: str) -> CheckpointError:
        before = find(self.run)
        last = f"the last complete one is {before[0].folder}" if before else "there is no earlier one"
        return CheckpointError(
            f"the checkpoint of step {step} in {self.run / FOLDER} cannot be written: {problem}; {last}. "
            "Free space there and start again with --resume auto"
        )


def _flush_own(work: Path, world: World) -> None:
    """Force this rank's share of the written files to disk."""
    files = sorted(path for path in work.rglob("*") if path.is_file())
    for _, path in world.split(files):
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def _write_flushed(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
