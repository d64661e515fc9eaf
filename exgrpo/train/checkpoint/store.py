"""The experience buffer on disk: append-only segments in safetensors format, named by the checksum of their content.

A save writes one new segment with the trajectories that no segment holds yet, and an index of those that are alive
(segment, row). So a save costs what is new, not what is stored. Only where more than half of a segment has died are its
living trajectories written again, into the new one: segments never hold more than twice what lives.
"""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from exgrpo.train.checkpoint.durable import DamagedFileError, write_whole
from exgrpo.train.records import Behaviour, Mask, Trajectory

SUFFIX = ".safetensors"
BEHAVIOURS: tuple[Behaviour, ...] = get_args(Behaviour)
"""By their numbers in a file."""


@dataclass(frozen=True)
class Segment:
    """A file of trajectories: how many, alive or not, and its size in bytes."""

    rows: int
    size: int


@dataclass(frozen=True, eq=False)
class Place:
    """Where a trajectory lies: the name of its segment and its row there."""

    segment: str
    row: int


def write_checked(folder: Path, arrays: dict[str, np.ndarray]) -> str:
    """Write arrays to a file that is named by its SHA-256, whole or not at all, and return that name."""
    content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    name = hashlib.sha256(content).hexdigest()
    write_whole(folder / f"{name}{SUFFIX}", content)
    return name


def read_checked(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Read what `write_checked` wrote.

    Raises:
        DamagedFileError: it is missing or its content has changed.
    """
    path = folder / f"{name}{SUFFIX}"
    if not path.is_file():
        raise DamagedFileError(f"{path} is missing")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != name:
        raise DamagedFileError(f"{path} is damaged: its content does not have the checksum in its name")
    return load(content)


class ExperienceStore:
    """Keeps trajectories in a folder.

    Args:
        folder: of the segments; it is made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._places: WeakKeyDictionary[Trajectory, Place] = WeakKeyDictionary()
        self._segments: dict[str, Segment] = {}

    def save(self, trajectories: Iterable[Trajectory]) -> dict[str, np.ndarray]:
        """Write the trajectories that are new and return the index of all given ones, in their order.

        Returns:
            segments: [S, 32] uint8, the names of the segments; segment and row: [N] int32, where each one lies.
        """
        alive = list(trajectories)
        new = self._to_write(alive)
        if new:
            name = write_checked(self.folder, _pack(new))
            self._segments[name] = Segment(len(new), self.size(name))
            for row, trajectory in enumerate(new):
                self._places[trajectory] = Place(name, row)
        places = [self._places[trajectory] for trajectory in alive]
        names = sorted({place.segment for place in places})
        number = {name: i for i, name in enumerate(names)}
        return {
            "segments": np.array([list(bytes.fromhex(name)) for name in names], np.uint8).reshape(-1, 32),
            "segment": np.array([number[place.segment] for place in places], np.int32),
            "row": np.array([place.row for place in places], np.int32),
        }

    def _to_write(self, alive: Sequence[Trajectory]) -> list[Trajectory]:
        """Those that no segment holds, and those in segments that are not whole or of which less than half is alive."""
        segments = [place.segment if (place := self._places.get(t)) else None for t in alive]
        living = Counter(segments)
        stay = {name for name, count in living.items() if name and self._may_stay(name, count)}
        return [trajectory for trajectory, name in zip(alive, segments, strict=True) if name not in stay]

    def _may_stay(self, name: str, living: int) -> bool:
        segment = self._segments[name]
        try:
            # All checkpoints share a segment: one that was lost is written again while its rows are in memory.
            return self.size(name) == segment.size and 2 * living >= segment.rows
        except FileNotFoundError:
            return False

    def load(self, index: dict[str, np.ndarray]) -> list[Trajectory]:
        """The trajectories of an index, in its order.

        Raises:
            DamagedFileError: a segment is missing or damaged.
        """
        trajectories: dict[int, Trajectory] = {}
        for number, name in enumerate(segment_names(index)):
            segment = _unpack(read_checked(self.folder, name))
            self._segments[name] = Segment(len(segment), self.size(name))
            for position in np.flatnonzero(index["segment"] == number).tolist():
                row = int(index["row"][position])
                trajectories[position] = _detached(segment[row])
                self._places[trajectories[position]] = Place(name, row)
        return [trajectories[position] for position in range(len(trajectories))]

    def size(self, name: str) -> int:
        """Bytes of a file of this store."""
        return (self.folder / f"{name}{SUFFIX}").stat().st_size

    def remove_unused(self, names: set[str]) -> None:
        """Delete the segments that are not among `names`."""
        for path in self.folder.iterdir():
            if path.name.removesuffix(SUFFIX) not in names:
                path.unlink()


def segment_names(index: dict[str, np.ndarray]) -> list[str]:
    """The names of the segments that an index refers to."""
    return [bytes(name).hex() for name in index["segments"]]


def _detached(trajectory: Trajectory) -> Trajectory:
    """A copy that does not keep the arrays of its whole segment in memory."""
    arrays = {"response": trajectory.response, "log_prob": trajectory.log_prob, "written": trajectory.written}
    copies: dict[str, Any] = {name: array.copy() for name, array in arrays.items() if array is not None}
    return dataclasses.replace(trajectory, **copies)


def _pack(trajectories: Sequence[Trajectory]) -> dict[str, npt.NDArray]:
    """As arrays; most runs have no observations, and no array of what is one."""
    observing = any(t.written is not None for t in trajectories)
    masks = {"written": np.concatenate([_written(t) for t in trajectories])} if observing else {}
    return {
        **masks,
        "response": np.concatenate([t.response for t in trajectories]),
        "log_prob": np.concatenate([t.log_prob for t in trajectories]),
        "length": np.array([len(t.response) for t in trajectories], np.int32),
        "question": np.array([t.question for t in trajectories], np.int32),
        "finished": np.array([t.finished for t in trajectories], np.uint8),
        "reward": np.array([t.reward for t in trajectories], np.float64),
        "step": np.array([t.step for t in trajectories], np.int32),
        "behaviour": np.array([BEHAVIOURS.index(t.behaviour) for t in trajectories], np.uint8),
        "key": np.array([t.key for t in trajectories], np.int64),
        "penalty": np.array([t.penalty for t in trajectories], np.float64),
    }


def _written(trajectory: Trajectory) -> npt.NDArray[np.uint8]:
    """[R] 1 where the policy wrote the token."""
    ones = np.ones(len(trajectory.response), np.uint8)
    return ones if trajectory.written is None else trajectory.written.astype(np.uint8)


def written_mask(values: npt.NDArray[np.uint8] | None) -> Mask | None:
    """What `_written` has packed, of one trajectory."""
    return None if values is None or values.all() else values.astype(bool)


def _unpack(arrays: dict[str, npt.NDArray]) -> list[Trajectory]:
    ends = np.cumsum(arrays["length"])[:-1]
    masks = np.split(arrays["written"], ends) if "written" in arrays else [None] * len(arrays["length"])
    columns = zip(
        arrays["question"].tolist(),
        np.split(arrays["response"], ends),
        np.split(arrays["log_prob"], ends),
        arrays["finished"].tolist(),
        arrays["reward"].tolist(),
        arrays["step"].tolist(),
        (BEHAVIOURS[number] for number in arrays["behaviour"].tolist()),
        arrays["key"].tolist(),
        arrays["penalty"].tolist(),
        map(written_mask, masks),
        strict=True,
    )
    return [
        Trajectory(question, response, log_prob, bool(finished), *others)
        for question, response, log_prob, finished, *others in columns
    ]
