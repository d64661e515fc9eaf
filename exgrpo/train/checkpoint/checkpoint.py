"""Checkpoints that survive a kill at any moment and a damaged disk.

    RUN/checkpoints/step_00000020/     one checkpoint; it exists under this name only when it is complete
        manifest.json                  what the checkpoint is, and a checksum of everything, itself included
        policy/                        weights and states of the optimiser, by rank
    RUN/experience/                    the buffer and other arrays of each checkpoint, named by their checksum

A checkpoint is written and flushed to disk under another name; renaming the folder is the last step. Deletion renames
the folder first, and the next load removes what a kill left under such names. A save checks only the sizes of existing
files. A load verifies every checksum, each rank a share of them; if one is wrong, all ranks use the checkpoint before.
"""

import logging
import shutil
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from exgrpo.train.checkpoint.listing import (
    DAMAGED,
    DELETED,
    EXPERIENCE,
    FOLDER,
    UNFINISHED,
    Checkpoint,
    Manifest,
    SavedFile,
    find,
    folder_name,
    folders,
    inspect,
    write_manifest,
)
from exgrpo.train.common.distributed import World, agree, on_main
from exgrpo.train.common.durable import SUFFIX, DamagedFileError, flush, read_checked, sha256, write_checked
from exgrpo.train.common.errors import CheckpointError, os_errors_as
from exgrpo.train.policy.policy import Policy
from exgrpo.train.replay import ReplayState

logger = logging.getLogger(__name__)

POLICY = "policy"
T = TypeVar("T")


class Resumable(Protocol):
    """A trainer whose state can be saved and restored."""

    def state(self) -> ReplayState:
        """Return everything, besides the policy, that is needed to continue exactly."""

    def restore(self, state: ReplayState) -> None:
        """Restore the state of a trainer with the same configuration and questions."""


@dataclass(eq=False)
class Checkpoints:
    """Writes and reads the checkpoints of a run.

    Attributes:
        world: the ranks; every method is a collective call.
        fingerprint: hash of the training questions; a run cannot continue on others.
        config: the configuration as plain values; every checkpoint has a copy.
        keep: number of checkpoints to keep; older ones are deleted once a newer one is complete.

    Raises:
        CheckpointError: the run's folder cannot be written.
    """

    run: Path
    world: World
    _: KW_ONLY
    fingerprint: str
    config: dict[str, Any]
    keep: int

    def __post_init__(self) -> None:
        self.experience = self.run / EXPERIENCE
        with os_errors_as(CheckpointError, f"{self.experience} cannot be written"):
            self.experience.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, policy: Policy, trainer: Resumable, progress: dict[str, Any]) -> None:
        """Write the checkpoint of a step, with plain values of the caller, `progress`, that `load` returns.

        Raises:
            CheckpointError: it cannot be written; earlier checkpoints are intact.
        """
        final = self.run / FOLDER / folder_name(step)
        work = final.with_suffix(UNFINISHED)
        self._write_on_main(step, lambda: self._clear(work, policy.checkpoint_bytes))
        self._write(step, lambda: policy.save_checkpoint(work / POLICY))
        listings = self.world.gather(self._write(step, lambda: _files(work)))
        names = sorted(set().union(*listings))  # on a network file system, ranks may not see all files yet
        mine = [name for _, name in self.world.split(names)]
        shares = self.world.gather(self._write(step, lambda: _flush_and_hash(work, mine)))
        files = {name: share[name] for name in names for share in shares if name in share}
        self._write_on_main(
            step, lambda: self._finish(final, work, self._manifest(step, files, trainer.state(), progress))
        )

    def _clear(self, work: Path, needed: int) -> None:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        free = shutil.disk_usage(work).free
        if needed > free:
            raise OSError(f"it needs {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free")

    def _manifest(
        self, step: int, files: dict[str, SavedFile], state: ReplayState, progress: dict[str, Any]
    ) -> Manifest:
        """Write the experience and return the manifest."""
        arrays = write_checked(self.experience, state.arrays)
        return Manifest(
            step=step,
            fingerprint=self.fingerprint,
            config=self.config,
            files=files,
            arrays=arrays,
            experience={arrays: (self.experience / f"{arrays}{SUFFIX}").stat().st_size},
            values=state.values,
            progress=progress,
        )

    def _finish(self, final: Path, work: Path, manifest: Manifest) -> None:
        write_manifest(work, manifest)
        if final.exists():
            self._delete(final)
        work.replace(final)
        flush(final.parent)
        flush(self.run)
        self._rotate()

    def _rotate(self) -> None:
        """Delete damaged checkpoints that a load has renamed, and those older than the newest `keep` complete ones."""
        for aside in (self.run / FOLDER).glob(f"*{DAMAGED}"):
            shutil.rmtree(aside)
        kept = find(self.run)[: self.keep]
        if len(kept) < self.keep:
            return  # an unreadable checkpoint may be sound: keep everything until enough others are complete
        for folder in folders(self.run):
            if folder.name < kept[-1].folder.name:
                self._delete(folder)
        needed = {f"{name}{SUFFIX}" for found in kept for name in found.manifest.experience}
        for path in self.experience.iterdir():
            if path.name not in needed:
                path.unlink()

    def _delete(self, folder: Path) -> None:
        """Delete a checkpoint so that, whenever power fails, it is complete or has another name."""
        deleted = folder.with_suffix(DELETED)
        shutil.rmtree(deleted, ignore_errors=True)
        folder.replace(deleted)
        flush(folder.parent)
        shutil.rmtree(deleted)

    def load(self, policy: Policy, trainer: Resumable) -> tuple[int, dict[str, Any]]:
        """Restore the newest sound checkpoint.

        Damaged ones are renamed, with a warning, and kept until the next checkpoint is complete.

        Returns:
            its step, and the caller's `progress`.

        Raises:
            CheckpointError: there is none, or the newest sound one belongs to other data, another model or another
                version of this package, or reading it is not permitted.
        """
        found, state, problems = self._newest_sound()
        on_main(self.world, lambda: self._set_damage_aside(found, problems))
        policy.load_checkpoint(found.folder / POLICY)
        trainer.restore(state)
        return found.step, found.manifest.progress

    def _newest_sound(self) -> tuple[Checkpoint, ReplayState, dict[Path, str]]:
        """Return the newest sound checkpoint with its state, and the problems of later ones by folder."""
        problems: dict[Path, str] = {}
        for folder in self.world.gather(on_main(self.world, self._folders))[0] or []:
            try:
                return *self._open(folder), problems
            except DamagedFileError as error:
                problems[folder] = str(error)
        raise CheckpointError(
            f"{self.run} has no sound checkpoint to continue from"
            + "".join(f"; {problem}" for problem in problems.values())
            + ". Put a sound copy back, or start a new run"
        )

    def _folders(self) -> list[Path]:
        with os_errors_as(CheckpointError, f"{self.run} cannot be read"):
            return folders(self.run)

    def _open(self, folder: Path) -> tuple[Checkpoint, ReplayState]:
        """Read a checkpoint and verify all of its files."""
        found = self._read(lambda: inspect(folder))
        if found.manifest.fingerprint != self.fingerprint:
            raise CheckpointError(f"{folder} belongs to other training questions than the configuration names")
        self._read(lambda: self._verify_share(found))
        arrays = self._read(lambda: read_checked(self.experience, found.manifest.arrays))
        return found, ReplayState(found.manifest.values, arrays)

    def _verify_share(self, found: Checkpoint) -> None:
        for _, (name, file) in self.world.split(list(found.manifest.files.items())):
            if sha256(found.folder / name) != file.sha256:
                raise DamagedFileError(f"{found.folder / name} is damaged: it does not have the checksum it had")

    def _set_damage_aside(self, found: Checkpoint, problems: dict[Path, str]) -> None:
        with os_errors_as(CheckpointError, f"{self.run} cannot be repaired"):
            for folder, problem in problems.items():
                # Under its own name it would count as one of the checkpoints to keep.
                aside = folder.with_name(folder.name + DAMAGED)
                shutil.rmtree(aside, ignore_errors=True)
                folder.replace(aside)
                logger.warning("%s; going on with %s; %s is the damaged checkpoint now", problem, found.folder, aside)
            for folder in (self.run / FOLDER).iterdir():  # remains of saves and deletions that were killed
                if folder.suffix in (UNFINISHED, DELETED):
                    shutil.rmtree(folder)

    def _read(self, action: Callable[[], T]) -> T:
        """Run a reading action on every rank; returns this rank's result.

        Raises:
            CheckpointError: on every rank, if one gets an error that is no damage.
            DamagedFileError: on every rank, if one finds damage; the message has the damage found by all ranks.
        """

        def attempt() -> tuple[T | None, str]:
            try:
                return action(), ""
            except DamagedFileError as error:
                return None, str(error)
            except PermissionError as error:  # no damage: with the permission fixed, no step is lost
                message = f"permission denied: {error.filename}; let this user read and write it"
                raise CheckpointError(message) from error
            except OSError as error:
                return None, f"{error.filename} cannot be read or written: {error.strerror}"

        result, damage = agree(self.world, attempt)
        if damages := list(dict.fromkeys(filter(None, self.world.gather(damage)))):
            raise DamagedFileError("; ".join(damages))
        return result  # type: ignore[return-value]

    def _write_on_main(self, step: int, action: Callable[[], None]) -> None:
        self._write(step, action if self.world.is_main else lambda: None)

    def _write(self, step: int, action: Callable[[], T]) -> T:
        """Run a writing action on every rank; if it fails on one, all raise the CheckpointError of the step."""

        def attempt() -> T:
            try:
                return action()
            except OSError as error:
                before = find(self.run)
                last = f"the last complete one is {before[0].folder}" if before else "there is no earlier one"
                raise CheckpointError(
                    f"the checkpoint of step {step} in {self.run / FOLDER} cannot be written: "
                    f"{error.strerror or error}; {last}. Free space there and start again with --resume auto"
                ) from error

        return agree(self.world, attempt)


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _flush_and_hash(folder: Path, names: list[str]) -> dict[str, SavedFile]:
    files = {}
    for path in (folder / name for name in names):
        flush(path)
        flush(path.parent)
        files[str(path.relative_to(folder))] = SavedFile(size=path.stat().st_size, sha256=sha256(path))
    return files
